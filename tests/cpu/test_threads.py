"""threads.py: physical cores, affinity and quotas, on made-up machines."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from nanopage.cpu import threads

SIBLINGS = ["0,4", "1,5", "2,6", "3,7"]  # of a machine with 4 cores of 2 hyperthreads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes the files of a machine; returns default_threads() there."""

    def make(allowed, siblings=SIBLINGS, quota=None):
        for cpu in range(2 * len(siblings)):
            topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(siblings[cpu % len(siblings)] + "\n")
        if quota is not None:
            (tmp_path / "fs/cgroup").mkdir(parents=True)
            (tmp_path / "fs/cgroup/cpu.max").write_text(quota + "\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
        return threads.default_threads(tmp_path)

    return make


@pytest.mark.parametrize(
    ("allowed", "quota", "expected"),
    [
        (range(8), None, 4),
        (range(8), "max 100000", 4),
        (range(8), "800000 100000", 4),
        (range(8), "250000 100000", 2),
        (range(8), "50000 100000", 1),
        ([0, 4], None, 1),  # one core's hyperthreads
        ([0, 1, 5], None, 2),
        ([6], "300000 100000", 1),
        (range(8), "nonsense", 4),
    ],
)
def test_one_thread_a_core_within_affinity_and_quota(machine, allowed, quota, expected):
    assert machine(allowed, quota=quota) == expected


def test_without_a_topology_it_asks_psutil(machine, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 3)
    assert machine(range(8), siblings=[]) == 3
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert threads.default_threads(Path("/nowhere")) == 1


@pytest.mark.parametrize(
    ("num_cpus", "most", "others", "expected"),
    [
        (2, 2, [0.0, 0.3, 0.5, 1.0, 0.3, 0.1], [2, 2, 1, 1, 1, 2]),
        (2, 2, [2.0, -0.1], [1, 2]),  # the two clocks do not agree exactly
        (8, 4, [1.0, 4.0, 4.5, 9.0, 0.0], [4, 4, 3, 1, 4]),  # hyperthreads are left to others first
        (1, 1, [1.0, 0.0], [1, 1]),
    ],
)
def test_cpus_that_others_use_are_left_to_them(num_cpus, most, others, expected):
    count = threads.ThreadCount(most)
    for used, wanted in zip(others, expected, strict=True):
        count.threads = count.choose(used, num_cpus)
        assert count.threads == wanted


def test_the_work_of_other_processes_is_measured_from_time_to_time(monkeypatch):
    # Others use a CPU in the first 0.5 s, then in a step of 3 s, and again in a pause, of which nobody knows when.
    times = [(0.0, 10.0, 5.0), (0.5, 11.0, 5.5), (1.0, 12.0, 6.5), (4.0, 18.0, 9.5), (9.0, 25.0, 10.0)]
    monkeypatch.setattr(threads.ThreadCount, "_times", lambda self: times.pop(0))
    monkeypatch.setattr(threads, "allowed_cpus", lambda: {0, 1})
    clock = iter((0.05, 0.5, 0.55, 1.0, 4.0, 4.1, 9.0))
    monkeypatch.setattr(threads.time, "perf_counter", lambda: next(clock))
    chosen = [2]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    count = threads.ThreadCount(2)
    for _ in range(5):
        count.set()
    assert chosen == [2, 1, 2, 1]  # a call without a change would slow down MKL
    count.reset()
    assert chosen[-1] == 2
    count.set()
    assert chosen[-1] == 1  # as before the pause
    assert times == []


def test_where_nothing_can_be_measured_all_threads_are_used(monkeypatch):
    def refuse(percpu):
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    count = threads.ThreadCount(2)
    count.INTERVAL = 0
    count.set()
    assert count.threads == 2


def test_processes_of_low_priority_do_not_count(monkeypatch):
    cpu = SimpleNamespace(user=3.0, system=1.0, nice=100.0, idle=50.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [cpu, cpu, cpu])
    monkeypatch.setattr(threads, "allowed_cpus", lambda: {0, 2})
    assert threads.ThreadCount(2)._times()[1] == 8.0


def test_the_engine_of_a_worker_is_no_other_process():
    """It has used CPU time, which the worker counts as its own."""
    used = psutil.Process().cpu_times()
    own = threads.ThreadCount(2)._times()[2]
    with_engine = threads.ThreadCount(2, engine=os.getpid())._times()[2]
    assert with_engine >= own + used.user + used.system > own
    child = subprocess.Popen(["true"])
    count = threads.ThreadCount(2, engine=child.pid)
    child.wait()
    assert count._times()[2] >= own  # an engine that has ended is no error


@pytest.mark.parametrize(
    ("before", "useful", "variable", "expected"),
    [(4, 2, None, 2), (2, 4, None, 2), (2, 2, None, 2), (4, 2, "4", 4)],
)
def test_threads_are_taken_never_added_and_not_against_the_users_word(monkeypatch, before, useful, variable, expected):
    monkeypatch.setattr(threads, "default_threads", lambda: useful)
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    now = [before]
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.append(count))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    threads.limit_threads()
    assert now[-1] == expected
    assert len(now) == 1 + (expected != before)
