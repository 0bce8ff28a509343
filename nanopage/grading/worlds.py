"""Worlds: the sizes of an engine and the requests that come to it, drawn at random, and made smaller."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

VOCAB_SIZE, MAX_TOKENS = 48, 12
AMPLE = {"num_blocks": 400, "block_size": 1, "max_num_seqs": 16, "max_num_batched_tokens": 400}


@dataclass(frozen=True)
class Request:
    """Arguments of `add_request`; before which step they come, and before which step, if any, it is aborted."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    n: int = 1
    stop_ids: tuple[int, ...] = ()
    arrival: int = 0
    abort_at: int | None = None

    def __str__(self) -> str:
        said = [each.name for each in fields(self)[1:] if getattr(self, each.name) != each.default]
        return f"{self.request_id}: {', '.join(f'{name}={getattr(self, name)}' for name in said)}"


@dataclass(frozen=True)
class World:
    """Requests, and the arguments of `Engine`. As many blocks, sequences and tokens as are in AMPLE limit nothing."""

    requests: tuple[Request, ...]
    sizes: dict[str, int]

    def least_blocks(self) -> int:
        """The blocks of the longest request."""
        longest = max(len(request.prompt_ids) + request.max_tokens for request in self.requests)
        return -(-longest // self.sizes["block_size"])


def draw_world(seed: int) -> World:
    """2 to 6 requests. Their prompts are made of the same few pieces, as long as a block, so that they share prefixes,
    and the same tokens come after different ones. Often a pool holds little more than the longest request."""
    rng = random.Random(seed)
    block_size, max_num_seqs = rng.choice([1, 2, 3, 4, 4, 8]), rng.choice([1, 2, 4, 8])
    pieces = [tuple(rng.choices(range(VOCAB_SIZE), k=block_size)) for _ in range(3)]
    requests = []
    for name in "abcdef"[: rng.randint(2, 6)]:
        prompt = sum(rng.choices(pieces, k=rng.randint(0, 16 // block_size)), ())
        prompt += tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(not prompt, 5)))
        request = Request(
            name, prompt, rng.choice([1, 3, 8, MAX_TOKENS]), arrival=rng.choice([0, 0, rng.randrange(20)])
        )
        if rng.random() < 0.5:
            n = rng.choice([1, rng.randint(1, min(3, max_num_seqs))])
            request = replace(request, temperature=rng.choice([0.7, 1.5]), seed=rng.randrange(100), n=n)
        if rng.random() < 0.25:
            request = replace(request, stop_ids=tuple(rng.sample(range(VOCAB_SIZE), 8)))
        if rng.random() < 0.15:
            request = replace(request, abort_at=request.arrival + rng.randint(1, 8))
        requests.append(request)
    budget = rng.choice([1, 3, 5, 8, 16, 400])
    sizes = {"block_size": block_size, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    num_blocks = World(tuple(requests), sizes).least_blocks() + rng.choice([0, 0, 1, 2, 5, 400])
    return World(tuple(requests), {"num_blocks": num_blocks, **sizes})


def shrink(world: World, fails: Callable[[World], bool]) -> World:
    """Make a world that fails simpler, one change after the other, until it passes after any change."""
    changed = True
    while changed:
        changed, index = False, 0
        while candidate := next((each for number, each in enumerate(simpler(world)) if number == index), None):
            if fails(candidate):
                world, changed = candidate, True
            else:
                index += 1
    return world


def simpler(world: World) -> Iterator[World]:
    """Worlds with one change, the greatest changes first."""
    requests, sizes = world.requests, world.sizes
    for index in range(len(requests) * (len(requests) > 1)):
        yield World(requests[:index] + requests[index + 1 :], sizes)
    for name, ample in AMPLE.items():
        if sizes[name] != ample:
            yield World(requests, sizes | {name: ample} | ({"num_blocks": 400} if name == "block_size" else {}))
    for index, request in enumerate(requests):
        for change in simpler_arguments(request):
            if change.items() - vars(request).items():
                yield World((*requests[:index], replace(request, **change), *requests[index + 1 :]), sizes)
    if world.least_blocks() < sizes["num_blocks"] < 400:
        yield World(requests, sizes | {"num_blocks": sizes["num_blocks"] - 1})


def simpler_arguments(request: Request) -> Iterator[dict]:
    prompt, half = request.prompt_ids, len(request.prompt_ids) // 2
    yield from ({"abort_at": None}, {"arrival": 0}, {"n": 1}, {"n": min(2, request.n)}, {"temperature": 0.0})
    yield from ({"seed": 0}, {"stop_ids": ()})
    yield from ({"stop_ids": (token,)} for token in request.stop_ids)
    yield from ({"max_tokens": max(1, less)} for less in (request.max_tokens // 2, request.max_tokens - 1))
    yield from ({"prompt_ids": part or prompt} for part in (prompt[:half], prompt[half:], prompt[:-1], prompt[1:]))
    yield {"arrival": max(0, request.arrival - 1)}
