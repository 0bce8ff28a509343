"""The recorded scenarios of the live view: nanopage/view/runs/*.jsonl.gz.

    python -m benchmarks.recordings          record all four with the default model
    python -m benchmarks.recordings beams    only one

The pools are small, so that blocks run out and the whole map fits on a screen.
"""

import gzip
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanopage import EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.engine.engine import LLMEngine
from nanopage.params import BeamSearchParams
from nanopage.view.export import RUNS
from nanopage.view.frames import Recorder

SYSTEM = (
    "You are a helpful assistant who answers in a friendly way, in plain English, with short sentences and at most "
    "one example, and who says so if a question cannot be answered. The question follows. "
)
QUESTIONS = (
    "Why is the sky blue?",
    "How do I boil an egg so that its yolk stays soft?",
    "What is the capital of France, and what is it known for?",
    "Write a sentence about the sea.",
    "Who wrote Faust?",
    "Name three trees that lose their leaves in winter, and two that do not.",
    "How far away is the moon?",
    "What does a block table do?",
)


@dataclass
class Arrival:
    """A request that arrives before the step `step`."""

    step: int
    prompt: str
    params: SamplingParams | BeamSearchParams
    priority: int = 0


@dataclass
class Scenario:
    """Requests on engines, one after the other, each with options of its own."""

    options: list[dict[str, Any]]
    arrivals: Callable[[], list[Arrival]]
    common: dict[str, Any] = field(default_factory=dict)


def sample(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def batching() -> list[Arrival]:
    return [Arrival(4 * i, (QUESTIONS[i % 8] + " ") * (1 + i % 3), sample(18 + 7 * (i % 4))) for i in range(14)]


def sharing() -> list[Arrival]:
    first = [Arrival(0, SYSTEM + QUESTIONS[i], sample(14 + i)) for i in range(4)]
    return first + [Arrival(26 + 3 * i, SYSTEM + QUESTIONS[i + 2], sample(16)) for i in range(6)]


def preemption() -> list[Arrival]:
    urgent = Arrival(24, QUESTIONS[1] * 3, sample(12), priority=-1)
    return [*(Arrival(i, QUESTIONS[i % 8] * (1 + i % 2), sample(34 + 3 * i)) for i in range(8)), urgent]


def beams() -> list[Arrival]:
    search = BeamSearchParams(width=4, max_tokens=24)
    several = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=20, ignore_eos=True)
    return [Arrival(0, QUESTIONS[3], search), Arrival(4, SYSTEM, several), Arrival(10, QUESTIONS[6], search)]


SCENARIOS = {
    "continuous-batching": Scenario(
        [{"num_gpu_blocks_override": 96, "max_num_seqs": 5, "max_num_batched_tokens": 64}], batching
    ),
    "prefix-sharing": Scenario([{"num_gpu_blocks_override": 64, "max_num_batched_tokens": 128}], sharing),
    "preemption": Scenario(
        [
            {"preemption_mode": "recompute", "swap_space": 0},
            {"preemption_mode": "swap", "swap_space": 0.02},
        ],
        preemption,
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 96, "scheduling_policy": "priority"},
    ),
    "beams": Scenario([{"num_gpu_blocks_override": 64}], beams),
}


def run(engine: LLMEngine, arrivals: list[Arrival]) -> None:
    """Hand in each request before its step, and make steps until all have ended."""
    step, todo = 0, sorted(arrivals, key=lambda arrival: arrival.step)
    while todo or engine.has_unfinished_requests():
        while todo and todo[0].step <= step:
            arrival = todo.pop(0)
            engine.add_request(f"{len(todo)}", arrival.prompt, arrival.params, arrival.priority)
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
        step += 1


def record(scenario: Scenario, file: Path, model: str | None = None, **options: Any) -> None:
    """Record a scenario. Its engines follow each other in the file, each with a key frame of its own.

    Args: model, options: as in EngineConfig. The scenario's options override them.
    """
    lines, started = io.BytesIO(), 0.0
    for each in scenario.options:
        config = EngineConfig(
            model=model, **{"block_size": 8, "enforce_eager": True} | options | scenario.common | each
        )
        engine = build_engine(config)
        assert isinstance(engine, LLMEngine)
        try:
            recorder = Recorder(engine, lines, engine.model_path.name if model else "SmolLM2-135M-Instruct", started)
            engine.listeners.append(recorder)
            run(engine, scenario.arrivals())
            started = recorder.frames.now() + 1
        finally:
            engine.shutdown()
    file.write_bytes(gzip.compress(lines.getvalue(), mtime=0))


def main(names: list[str]) -> None:
    RUNS.mkdir(exist_ok=True)
    for name in names or SCENARIOS:
        file = RUNS / f"{name}.jsonl.gz"
        record(SCENARIOS[name], file)
        print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
