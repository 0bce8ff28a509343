"""Exercise of chapter 8: a router without a memory.

    pytest -x docs/course/exercises/test_router.py

nanopage's router remembers which prefixes it has sent to which replica (nanopage/server/routing.py). If there are
several routers, or one restarts, they have to tell each other. A hash needs no memory: every router computes the same.

*Rendezvous hashing* (Thaler and Ravishankar, 1996): give each pair of a prompt's beginning and a replica a score, a
hash of both, and take the replica with the largest one. Prompts with the same beginning come to the same replica. If a
replica is removed, only its prompts move.

But one beginning may be so popular that its replica is overloaded. So the load is *bounded* (Mirrokni et al., 2016): a
replica may take a request only if its load, with this request, is at most FACTOR times the average load. If the one
with the largest score may not, ask the one with the second largest, and so on.

Fill in `choose_replica`. `RendezvousRouter` puts it into the simulator.
"""

from collections.abc import Hashable, Sequence
from hashlib import sha256

from nanopage.server.routing import Router

FACTOR = 2.0


def score(beginning: Hashable, replica: str) -> bytes:
    """The same in every process, unlike Python's hash()."""
    return sha256(f"{beginning!r} {replica}".encode()).digest()


def choose_replica(beginning: Hashable, loads: dict[str, int], num_tokens: int) -> str:
    """Which replica gets a request.

    A replica may take it if

        its load + num_tokens  <=  FACTOR * (all loads + num_tokens) / number of replicas

    Of those that may, take the one with the largest `score`. If none may, take the one with the smallest load; of
    equally small ones, the one with the largest `score`.

    Args:
        beginning: names the first parts of the prompt.
        loads: replica -> tokens that it has been sent and has not computed yet.
        num_tokens: of the request.
    """
    raise NotImplementedError("exercise 8")


class RendezvousRouter(Router):
    """The router of the server and of the simulator, choosing by `choose_replica`."""

    def choose(self, parts: Sequence[Hashable], part_tokens: int, num_tokens: int, exclude: Sequence[str] = ()) -> str:
        loads = {name: load.outstanding for name, load in self.loads.items() if name not in exclude}
        if not loads:
            raise LookupError("no replica is running")
        beginning = tuple(parts[:2])  # the first part is often the same for all users of an application
        chosen = choose_replica(beginning, loads, num_tokens)
        self.loads[chosen].outstanding += num_tokens
        return chosen
