"""Router: which of several replicas gets a request. Imports no torch; the simulator uses it as well.

A replica answers a request sooner if its prefix cache has the beginning of the prompt, and later if it is busy. The
router knows neither. It remembers what it has sent to each replica, and which requests have not ended yet.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

POLICIES = ("prefix", "least", "round-robin")
MARGIN = 1.0  # outstanding tokens that one known token of the prefix makes up for; chosen with the simulator
MAX_PARTS = 65_536  # parts that are remembered for each replica


@dataclass(slots=True)
class Load:
    """What the router has sent to a replica."""

    outstanding: int = 0  # tokens of the requests that have not ended
    parts: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)  # known prefixes, least recently used first


class Router:
    """Sends each request to a replica.

    Args:
        policy: "prefix": the replica with the fewest outstanding tokens, after `margin` of them are forgiven for each
            token of the prompt's longest known prefix. "least": the fewest outstanding tokens. "round-robin": in turn.
        margin: with "prefix", how many outstanding tokens a known token makes up for. 0 is the same as "least".
        max_parts: how many parts are remembered for each replica; the least recently used are forgotten first.

    Raises: ValueError for an unknown policy, a negative margin or a `max_parts` below 1, by name.
    """

    def __init__(self, policy: str = "prefix", margin: float = MARGIN, max_parts: int = MAX_PARTS):
        if policy not in POLICIES:
            raise ValueError(f"router policy {policy!r} is not known; known: {', '.join(POLICIES)}")
        if not margin >= 0:
            raise ValueError(f"margin={margin} must be at least 0")
        if max_parts < 1:
            raise ValueError(f"max_parts={max_parts} must be at least 1")
        self.policy, self.margin, self.max_parts = policy, margin, max_parts
        self.loads: dict[str, Load] = {}
        self._turn = 0

    def add(self, replica: str) -> None:
        """Add a replica that has started. A known replica keeps its load."""
        self.loads.setdefault(replica, Load())

    def remove(self, replica: str) -> None:
        """Remove a replica that has ended, and its prefix cache."""
        self.loads.pop(replica, None)

    def choose(self, parts: Sequence[Hashable], part_tokens: int, num_tokens: int, exclude: Sequence[str] = ()) -> str:
        """Choose a replica, and count the request as sent to it.

        Args:
            parts: the prompt, cut into parts of the same length. Each names its part and all before it, as the hashes
                of the block manager do.
            part_tokens: tokens in a part.
            num_tokens: the request's tokens, in its prompt and in its output, as far as is known.
            exclude: replicas that must not get it.

        Raises: LookupError if there is no replica.
        """
        choices = [replica for replica in self.loads if replica not in exclude]
        if not choices:
            raise LookupError("no replica is running")
        if self.policy == "round-robin":
            chosen = choices[self._turn % len(choices)]
            self._turn += 1
        elif self.policy == "least" or not parts:
            chosen = min(choices, key=lambda replica: self.loads[replica].outstanding)
        else:
            chosen = min(choices, key=lambda replica: self._cost(self.loads[replica], parts, part_tokens))
        load = self.loads[chosen]
        load.outstanding += num_tokens
        if self.policy == "prefix":
            self._remember(load, parts)
        return chosen

    def finish(self, replica: str, num_tokens: int) -> None:
        """Subtract work from a replica's load, when a request ends or makes progress."""
        if (load := self.loads.get(replica)) is not None:
            load.outstanding -= num_tokens

    def _cost(self, load: Load, parts: Sequence[Hashable], part_tokens: int) -> float:
        return load.outstanding - self.margin * part_tokens * known_prefix(load, parts)

    def _remember(self, load: Load, parts: Sequence[Hashable]) -> None:
        for part in reversed(parts):  # so that the end of a prompt is forgotten before its beginning
            load.parts[part] = None
            load.parts.move_to_end(part)
        while len(load.parts) > self.max_parts:
            load.parts.popitem(last=False)


def known_prefix(load: Load, parts: Sequence[Hashable]) -> int:
    """How many of the first parts the replica has seen."""
    for index, part in enumerate(parts):
        if part not in load.parts:
            return index
    return len(parts)
