"""threads.py: physical cores, affinity and quotas, on made-up machines."""

import os
from pathlib import Path

import psutil
import pytest
import torch

from nanopage.worker import threads

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
