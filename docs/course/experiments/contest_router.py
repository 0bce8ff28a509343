"""Your router beside nanopage's, on three traces and four simulated replicas.

python docs/course/experiments/contest_router.py                # with exercises/router.py
python docs/course/experiments/contest_router.py --solutions    # with ours
"""

import random
import sys
from pathlib import Path
from types import ModuleType

import contest
import routers

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks.traces import Request, Trace
from nanopage.server.routing import POLICIES

NUM_REPLICAS = 4


def documents() -> Trace:
    """Questions about 40 documents of 2,048 tokens each, more than a replica can keep."""
    rng, clock, requests = random.Random(0), 0.0, []
    for number in range(200):
        clock += rng.expovariate(2.0)
        document = 4 * rng.randrange(40)
        requests.append(Request(number, clock, 2048 + 60, 30, [*range(document, document + 4)]))
    return Trace(requests)


def strangers() -> Trace:
    """Requests that have nothing in common."""
    rng, clock, requests = random.Random(0), 0.0, []
    for number in range(200):
        clock += rng.expovariate(4.0)
        requests.append(Request(number, clock, rng.randrange(100, 3000), rng.randrange(10, 100), []))
    return Trace(requests)


TRACES = {"conversations": routers.conversations, "documents": documents, "strangers": strangers}


def run(exercise: ModuleType) -> None:
    rows = {}
    for name, make in TRACES.items():
        yours = routers.run("prefix", NUM_REPLICAS, exercise.RendezvousRouter(), make())
        theirs = {policy: routers.run(policy, NUM_REPLICAS, trace=make()).ttft for policy in POLICIES}
        rows[name] = theirs | {"yours": yours.ttft}
    contest.show(f"mean time to the first token in s, with {NUM_REPLICAS} replicas", rows, ".2f", min)


if __name__ == "__main__":
    contest.main("router", run)
