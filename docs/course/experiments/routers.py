"""A made-up trace on 1, 2, 4 and 8 simulated replicas, behind three routers.

python docs/course/experiments/routers.py
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks.costs import read_costs
from benchmarks.simulate import DEFAULT_COSTS
from benchmarks.simulator import Configuration, Setup, outcome_of, run_replicas
from benchmarks.traces import Trace, read_trace
from nanopage.server.routing import POLICIES, Router

SPEED = 8  # times as fast as the trace
REPLICAS = (1, 2, 4, 8)


@dataclass
class Figures:
    ttft: float  # mean, in seconds
    hits: float  # the share of prompt tokens that were in a prefix cache


def setup() -> Setup:
    """A replica as large as one that was measured, but with a small KV cache, so that prefixes compete for it."""
    return Setup(read_costs(DEFAULT_COSTS), num_blocks=1500)


def conversations() -> Trace:
    return read_trace(Path(__file__).parents[3] / "benchmarks" / "made_up_trace.jsonl", speed=SPEED)


def run(policy: str, num_replicas: int, router: Router | None = None, trace: Trace | None = None) -> Figures:
    """Args: router: instead of one with this policy. trace: instead of `conversations`."""
    trace = trace or conversations()
    outcome = outcome_of(trace, run_replicas(trace, Configuration(setup(), num_replicas, policy), router=router))
    return Figures(float(outcome.ttft.mean()), float(outcome.cached.sum() / outcome.input_len.sum()))


def main() -> None:
    print("mean TTFT in s (tokens of prompts that were cached)\n")
    print("replicas" + "".join(f"{policy:>18}" for policy in POLICIES))
    for count in REPLICAS:
        cells = [run(policy, count) for policy in POLICIES]
        print(f"{count:8}" + "".join(f"{each.ttft:10.2f} ({100 * each.hits:3.0f} %)" for each in cells))


if __name__ == "__main__":
    main()
