"""Workers in processes: how an engine starts them, what it notices of them, and what it leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import programs
import psutil
import pytest
import torch.distributed as dist
from helpers import ForkedLink, finish, random_tokens, tiny_model

from nanopage import AsyncLLM, EngineArgs, EngineConfig, LLMEngine, SamplingParams
from nanopage.aio.async_llm import EngineDeadError
from nanopage.build import build_engine
from nanopage.distributed import messages, process_executor
from nanopage.distributed.process_executor import ProcessExecutor
from nanopage.startup import worker as startup
from nanopage.startup.worker import build_worker
from nanopage.step import Batch, WorkerDiedError
from nanopage.weights import loader
from nanopage.worker.worker import Worker

ROOT = Path(__file__).parents[2]
LONG_ANSWER = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(process_executor, "ProcessLink", ForkedLink)


def config(model, **options) -> EngineConfig:
    defaults = {"device": "cpu", "max_model_len": 256, "num_gpu_blocks_override": 64, "enforce_eager": True}
    return EngineConfig(**defaults | {"model": str(model), "tensor_parallel_size": 2} | options)


def add_requests(engine: LLMEngine, count: int = 3) -> None:
    for i, prompt in enumerate(random_tokens([5] * count)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, LONG_ANSWER)


def pids(engine: LLMEngine) -> list[int]:
    return [getattr(link, "pid", None) or link.process.pid for link in engine.executor.links]


def gone(processes: list[int]) -> bool:
    """Whether all processes have ended. Waits for it, a minute at most."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in processes):
            return True
        time.sleep(0.02)
    return False


def test_workers_start_answer_and_end(model):
    """Processes of their own, as a user has them; the others of this file are forks."""
    alone = build_engine(config(model, tensor_parallel_size=1))
    add_requests(alone)
    expected = finish(alone)
    engine = build_engine(config(model, distributed_executor_backend="mp"))
    processes = pids(engine)
    assert len(set(processes)) == 2 and os.getpid() not in processes
    for process in map(psutil.Process, processes):
        listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert all(connection.laddr.ip in ("127.0.0.1", "::1") for connection in listening)
        assert process.environ()["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    add_requests(engine)
    answers = finish(engine)
    assert [answers[key].outputs[0].token_ids for key in "012"] == [expected[key].outputs[0].token_ids for key in "012"]
    engine.shutdown()
    assert gone(processes)
    with pytest.raises(WorkerDiedError, match="shut down"):
        engine.executor.submit(Batch())


def test_one_worker_may_have_a_process(model, forked):
    engine = build_engine(config(model, tensor_parallel_size=1, distributed_executor_backend="mp"))
    add_requests(engine)
    assert len(finish(engine)) == 3
    engine.shutdown()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_a_killed_worker_ends_every_request_with_an_error_that_names_it(model, forked, victim, sizes):
    options = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    engine = build_engine(config(model, **options))
    processes = pids(engine)
    add_requests(engine)
    for _ in range(4):
        engine.step()
    os.kill(processes[victim], signal.SIGKILL)
    outputs = finish(engine)
    assert {output.error for output in outputs.values()} == {f"rank {victim} of 2: was killed by SIGKILL"}
    assert [len(outputs[key].outputs[0].token_ids) > 0 for key in "012"] == [True] * 3  # nothing is taken back
    assert gone(processes)
    with pytest.raises(WorkerDiedError, match=f"rank {victim} of 2"):
        engine.add_request("late", "the cat", LONG_ANSWER)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.shutdown()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_worker_is_noticed(model, forked, victim, monkeypatch):
    monkeypatch.setattr(process_executor, "STEP_LIMIT", 2.0)
    monkeypatch.setattr(process_executor, "PING_SECONDS", 0.2)
    engine = build_engine(config(model))
    processes = pids(engine)
    add_requests(engine)
    engine.step()
    os.kill(processes[victim], signal.SIGSTOP)
    outputs = finish(engine)
    assert all(f"rank {victim} of 2: it has not answered" in output.error for output in outputs.values())
    assert gone(processes)


def test_a_stopped_worker_does_not_read_large_messages(model, forked, monkeypatch):
    monkeypatch.setattr(process_executor, "STEP_LIMIT", 2.0)
    monkeypatch.setattr(process_executor, "SMALL", 100)
    engine = build_engine(config(model))
    os.kill(pids(engine)[1], signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match="rank 1 of 2"):
        for _ in range(1000):
            engine.executor.submit(Batch(cleared=[0] * 10_000))
    assert engine.executor.error is not None


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_an_exception_in_a_worker_is_the_error_of_every_request(model, forked, victim, sizes, monkeypatch):
    launch = Worker.launch

    def failing(self, batch):
        if dist.get_rank() == victim and batch.starts and batch.starts[0] > 8:
            raise ZeroDivisionError("made up")
        return launch(self, batch)

    monkeypatch.setattr(Worker, "launch", failing)
    engine = build_engine(config(model, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1]))
    processes = pids(engine)
    add_requests(engine)
    outputs = finish(engine)
    assert {output.error for output in outputs.values()} == {f"rank {victim} of 2: ZeroDivisionError: made up"}
    assert gone(processes)


@pytest.mark.parametrize("kind", [ValueError, MemoryError, FileNotFoundError, ZeroDivisionError])
def test_an_exception_at_start_names_the_rank_and_leaves_nothing(model, forked, kind, monkeypatch):
    def failing(config, model_config, checkpoint, on_progress, ranks, agree):
        if ranks.rank == 1:
            raise kind("made up")
        return build_worker(config, model_config, checkpoint, on_progress, ranks, agree)

    monkeypatch.setattr(startup, "build_worker", failing)
    before = {child.pid for child in psutil.Process().children()}
    expected = WorkerDiedError if kind is ZeroDivisionError else kind
    with pytest.raises(expected, match=r"rank 1.*made up"):
        build_engine(config(model))
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_at_start_is_noticed(model, forked, how, monkeypatch):
    monkeypatch.setattr(process_executor, "START_LIMIT", 3.0)

    def dying(*arguments):
        if arguments[4].rank == 1:
            os.kill(os.getpid(), how)
        return build_worker(*arguments)

    monkeypatch.setattr(startup, "build_worker", dying)
    executor = ProcessExecutor(config(model), loader.read_config(model), model)
    with pytest.raises(WorkerDiedError, match=r"rank 1 of 2: (was killed by SIGKILL|it has not answered)"):
        executor.start()
    assert all(link.ended() for link in executor.links)


def test_workers_that_load_different_files_are_refused(model, forked, monkeypatch):
    fingerprint = loader.fingerprint
    monkeypatch.setattr(loader, "fingerprint", lambda *arguments: fingerprint(*arguments) + str(os.getpid()))
    with pytest.raises(ValueError, match=rf"rank 1 has loaded other files of {model} than rank 0"):
        build_engine(config(model))


def test_workers_that_compute_in_different_dtypes_are_refused(model, forked, monkeypatch):
    """As on two machines, of which one has a processor with bfloat16."""

    def other_dtype(*arguments):
        *before, ranks, agree = arguments

        def measured(capacity):
            if ranks.rank == 1:
                capacity.dtype = "float16"
            return agree(capacity)

        return build_worker(*before, ranks, measured)

    monkeypatch.setattr(startup, "build_worker", other_dtype)
    with pytest.raises(ValueError, match=r"rank 1 computes in float16, and rank 0 in \w+: give dtype"):
        build_engine(config(model))


def test_the_exception_of_a_worker_that_is_gone_is_not_lost(model, forked, monkeypatch):
    """The engine sends it the next message before it has read how it ended."""

    def failing(self):
        raise RuntimeError("no rest")

    monkeypatch.setattr(Worker, "rest", failing)
    engine = build_engine(config(model, tensor_parallel_size=1, distributed_executor_backend="mp"))
    engine.executor.rest()
    deadline = time.monotonic() + 60
    while engine.executor.links[0].ended() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    add_requests(engine)
    assert all("rank 0 of 1: RuntimeError: no rest" in output.error for output in finish(engine).values())


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (40, "signal 40")])
def test_any_signal_has_a_name(number, name):
    assert process_executor.signal_name(number) == name


def test_a_fingerprint_depends_on_the_contents(tmp_path):
    model = tiny_model(tmp_path / "a")
    same = tiny_model(tmp_path / "b")
    other = tiny_model(tmp_path / "c", seed=1)
    assert loader.fingerprint(model) == loader.fingerprint(same) != loader.fingerprint(other)
    assert loader.fingerprint(model, "dummy") == loader.fingerprint(other, "dummy")


def test_every_worker_has_as_many_blocks_as_the_smallest(model, forked, monkeypatch):
    from nanopage.worker import memory

    def blocks_of_rank(*arguments):
        return 20 + dist.get_rank()

    monkeypatch.setattr(memory, "num_blocks_that_fit", blocks_of_rank)
    engine = build_engine(config(model, num_gpu_blocks_override=None, max_model_len=None, preemption_mode="swap"))
    assert engine.capacity.num_blocks == 20
    assert engine.max_model_len == 320
    add_requests(engine)
    assert not any(output.error for output in finish(engine).values())
    engine.shutdown()


def test_two_engines_live_side_by_side(model, forked):
    engines = [
        build_engine(config(model)),
        build_engine(config(model, tensor_parallel_size=1, pipeline_parallel_size=2)),
    ]
    for engine in engines:
        add_requests(engine)
    outputs: list[dict] = [{}, {}]
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, mine in zip(engines, outputs, strict=True):
            mine |= {output.request_id: output for output in engine.step()}
    first, second = ([mine[key].outputs[0].token_ids for key in "012"] for mine in outputs)
    assert first == second
    os.kill(pids(engines[0])[0], signal.SIGKILL)
    add_requests(engines[1])
    assert not any(output.error for output in finish(engines[1]).values())
    for engine in engines:
        engine.shutdown()


def test_results_of_discarded_steps_are_never_returned(model, forked):
    """Ctrl-C while the engine waits: the step goes on in the workers, and its result comes later."""
    engine = build_engine(config(model))
    add_requests(engine)
    result, times = engine.executor.result, 0

    def interrupted():
        nonlocal times
        times += 1
        if times in (3, 4, 9):
            raise KeyboardInterrupt
        return result()

    engine.executor.result = interrupted
    outputs = {}
    while engine.has_unfinished_requests():
        with contextlib.suppress(KeyboardInterrupt):
            outputs |= {output.request_id: output for output in engine.step()}
    engine.shutdown()
    alone = build_engine(config(model, tensor_parallel_size=1))
    add_requests(alone)
    expected = finish(alone)
    assert [outputs[key].outputs[0].token_ids for key in "012"] == [expected[key].outputs[0].token_ids for key in "012"]


def test_pings_are_some_time_apart(model, forked, monkeypatch):
    """The CPU time of pings and answers would be missing in the steps."""
    monkeypatch.setattr(process_executor, "PING_SECONDS", 0.02)
    launch = Worker.launch

    def slow(self, batch):
        time.sleep(0.05)
        return launch(self, batch)

    monkeypatch.setattr(Worker, "launch", slow)
    engine = build_engine(config(model))
    send, pings = engine.executor._send, []

    def count(rank, message):
        if isinstance(message, messages.Ping) and rank == 0:
            pings.append(time.monotonic())
        send(rank, message)

    engine.executor._send = count
    add_requests(engine)
    finish(engine)
    engine.shutdown()
    assert len(pings) > 3
    assert min(later - earlier for earlier, later in pairwise(pings)) >= 0.02


@pytest.mark.parametrize("method", ["recv_bytes", "send_bytes"])
def test_ctrl_c_within_a_message_ends_the_workers(model, forked, monkeypatch, method):
    """The rest of the message would be taken for the next one."""
    engine = build_engine(config(model))
    add_requests(engine)
    engine.step()

    def interrupted(connection, *arguments):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert all("Ctrl-C interrupted a message" in output.error for output in finish(engine).values())
    assert all(link.ended() for link in engine.executor.links)


def test_the_log_of_workers_is_that_of_the_engine(model, forked, caplog):
    caplog.set_level("INFO", "nanopage")
    build_engine(config(model)).shutdown()
    assert "steps run eagerly" in caplog.text
    assert caplog.text.count("KV cache") == 1  # other workers send only warnings


def test_readers_of_an_async_engine_are_told(model, forked):
    import asyncio

    async def main():
        options = {name: value for name, value in vars(config(model)).items() if value is not None}
        llm = AsyncLLM.from_engine_args(EngineArgs(**options))
        stream = llm.generate({"prompt_token_ids": [5, 6, 7]}, LONG_ANSWER, "a")
        output = await anext(stream)
        os.kill(pids(llm.engine)[1], signal.SIGKILL)
        with contextlib.suppress(EngineDeadError):
            async for output in stream:
                last = output
            assert "rank 1 of 2" in last.error
        while not llm.errored:
            await asyncio.sleep(0.01)
        assert "rank 1 of 2" in str(llm.dead_error)
        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            await anext(llm.generate({"prompt_token_ids": [5]}, LONG_ANSWER, "b"))
        llm.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_while_no_request_is_there_is_noticed(model, forked, monkeypatch, how):
    import asyncio

    monkeypatch.setattr(process_executor, "STEP_LIMIT", 2.0)

    async def main():
        options = {name: value for name, value in vars(config(model)).items() if value is not None}
        llm = AsyncLLM.from_engine_args(EngineArgs(**options))
        async for _ in llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2), "a"):
            pass
        await llm.check_health()
        os.kill(pids(llm.engine)[1], how)
        deadline = time.monotonic() + 60
        while not llm.errored and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2.*(SIGKILL|has not answered)"):
            await llm.check_health()
        llm.shutdown()

    asyncio.run(main())


ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SCRIPT = """
import sys
from nanopage import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_model_len=64, num_gpu_blocks_override=16, enforce_eager=True,
          distributed_executor_backend="mp", pipeline_parallel_size=int(sys.argv[2]))
print(*[link.process.pid for link in llm.engine.executor.links], flush=True)
if sys.argv[3] == "waits":
    sys.stdin.read()
"""


@pytest.mark.parametrize(("num_workers", "how"), [(1, "returns"), (2, "waits")])
def test_no_worker_outlives_its_engine(model, tmp_path, num_workers, how):
    """Whether the program ends without a word or is killed. It has no guard of __main__, as `spawn` would need."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        ["true"], preexec_fn=programs.forked(tmp_path / "script.py", model, num_workers, how, env=os.environ | ENV),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == num_workers
        if how == "waits":
            process.kill()
        process.communicate(timeout=60)
    assert process.returncode == (0 if how == "returns" else -signal.SIGKILL)
    assert gone(workers)


@pytest.mark.parametrize(
    "start",
    [
        "from nanopage.distributed.process_executor import ProcessLink; held = ProcessLink(0, 1); "
        "process = held.process",
        "from nanopage.text.chat_template import TemplateRenderer; held = TemplateRenderer().process; "
        "held._start(None); process = held._process",
    ],
    ids=["worker", "templates"],
)
def test_a_stopped_process_does_not_outlive_its_program(start):
    code = f"{start}; print(process.pid, flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        process = psutil.Process(int(program.stdout.readline()))
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        program.kill()
    assert not psutil.wait_procs([process], timeout=60)[1]
