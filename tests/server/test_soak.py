"""Streaming clients over real sockets, half of them cut at random moments: nothing is lost, mixed up or leaked.

`NANOPAGE_SOAK=600 NANOPAGE_SOAK_CLIENTS=1000 pytest tests/server/test_soak.py -s` runs for ten minutes.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import uvicorn

from nanopage import LLM, AsyncLLM, EngineArgs, SamplingParams
from nanopage.aio.engine_thread import Inbox
from nanopage.server.app import create_app
from nanopage.server.state import ServerState
from nanopage.view.invariants import check_blocks

SECONDS = float(os.environ.get("NANOPAGE_SOAK", "2"))
NUM_CLIENTS = int(os.environ.get("NANOPAGE_SOAK_CLIENTS", "60"))
OPTIONS = {"dtype": "float64", "device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 1024, "block_size": 8}
WORDS = ["the", "cat", "and", "dog", "in", "a", "house", "é", "…"]


def make_work(model, rng, count=40):
    """Requests, and the texts that the offline engine gives."""
    bodies = [
        {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 20))),
            "seed": i,
            "max_tokens": rng.randint(1, 60),
            "ignore_eos": True,
            "temperature": rng.choice([0, 1]),
        }
        for i in range(count)
    ]
    params = [SamplingParams(**{name: v for name, v in body.items() if name != "prompt"}) for body in bodies]
    outputs = LLM(str(model), **OPTIONS).generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    return [
        {"body": body | {"stream": True}, "text": output.outputs[0].text}
        for body, output in zip(bodies, outputs, strict=True)
    ]


class Watched:
    """A server in this process, and what happens in it: the lag of its event loop, and the steps until an abort."""

    def __init__(self, model):
        self.llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))
        self.state = ServerState(["tiny"], max_queue=10_000, llm=self.llm)
        self.lags, self.steps_to_abort, self.num_steps = [], [], 0
        self._posted: dict[str, int] = {}
        self.llm.engine.listeners.append(self._count_step)
        post, abort = self.llm.engine_thread.post, self.llm.engine.abort

        def watched_post(message):
            if isinstance(message, Inbox):
                self._posted[message.request_id] = self.num_steps
            post(message)

        def watched_abort(request_id):
            self.steps_to_abort.append(self.num_steps - self._posted.pop(request_id))
            return abort(request_id)

        self.llm.engine_thread.post, self.llm.engine.abort = watched_post, watched_abort
        config = uvicorn.Config(create_app(self.state), port=0, log_level="warning", backlog=2048)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def _count_step(self, stats):
        self.num_steps += 1

    async def _serve(self):
        probe = asyncio.create_task(self._measure_lag())
        await self.server.serve()
        probe.cancel()

    async def _measure_lag(self):
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            self.lags.append(time.perf_counter() - before - 0.01)

    def start(self) -> int:
        """Start serving. Returns the port."""
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self.server.servers[0].sockets[0].getsockname()[1]

    def stop(self):
        self.server.should_exit = True
        self.thread.join()
        self.llm.shutdown()


def percentile(values, percent):
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))] if values else 0.0


def test_a_crowd_of_streaming_clients(model, caplog):
    caplog.set_level("WARNING", "nanopage")
    work = make_work(model, random.Random(0))
    watched = Watched(model)
    port, process = watched.start(), psutil.Process()
    try:
        task = {"port": port, "seconds": SECONDS, "concurrency": NUM_CLIENTS, "seed": 1, "work": work}
        task["at_least"] = 21  # complete and cut, though a busy machine takes longer
        task["longest_cut"] = 0.02 * NUM_CLIENTS
        client = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("soak_client.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        client.stdin.write(json.dumps(task))
        client.stdin.close()
        memory = []
        while client.poll() is None:
            memory.append(process.memory_info().rss / 2**20)
            time.sleep(min(1, SECONDS / 10))
        result = json.loads(client.stdout.read())
        deadline = time.monotonic() + 60
        while (watched.state.num_active or watched.llm.engine_thread.inboxes) and time.monotonic() < deadline:
            time.sleep(0.01)
        manager = watched.llm.engine.scheduler.block_manager
        check_blocks(manager)
        assert manager.num_free_blocks == manager.num_blocks
        assert watched.state.num_active == watched.state.num_entering == 0
        thread = watched.llm.engine_thread
        assert thread.num_waiting == thread.num_waiting_tokens == 0 and not thread.inboxes
        assert result["num_wrong"] == 0, result["wrong"]
        assert min(result["complete"], result["cut"]) >= task["at_least"]
        assert watched.steps_to_abort and max(watched.steps_to_abort) <= 2
        if SECONDS >= 60:  # allocators settle first
            half = len(memory) // 2
            assert max(memory[half:]) < 1.1 * max(memory[:half])
        print(
            f"\n{result['complete']} complete, {result['cut']} cut, {watched.num_steps} steps in {SECONDS:g} s; "
            f"{len(watched.steps_to_abort)} aborts, at most {max(watched.steps_to_abort)} steps after the cut; "
            f"lag of the event loop: P50 {percentile(watched.lags, 50) * 1e3:.1f} ms, "
            f"P99 {percentile(watched.lags, 99) * 1e3:.1f} ms, most {max(watched.lags) * 1e3:.0f} ms; "
            f"first text: P50 {result['median_seconds_to_first_text']:.2f} s; "
            f"resident memory {' '.join(f'{memory[i * (len(memory) - 1) // 10]:.0f}' for i in range(11))} MiB"
        )
    finally:
        watched.stop()
