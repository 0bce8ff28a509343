"""Exercise of chapter 8, solved."""

from collections.abc import Hashable, Sequence
from hashlib import sha256

from nanopage.server.routing import Router

FACTOR = 2.0


def score(beginning: Hashable, replica: str) -> bytes:
    """The same in every process, unlike Python's hash()."""
    return sha256(f"{beginning!r} {replica}".encode()).digest()


def choose_replica(beginning: Hashable, loads: dict[str, int], num_tokens: int) -> str:
    """Which replica gets a request. Rules as in the exercise."""
    most = FACTOR * (sum(loads.values()) + num_tokens) / len(loads)
    allowed = [replica for replica, load in loads.items() if load + num_tokens <= most]
    if not allowed:
        least = min(loads.values())
        allowed = [replica for replica, load in loads.items() if load == least]
    return max(allowed, key=lambda replica: score(beginning, replica))


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
