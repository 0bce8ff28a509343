"""Route: chooses the replica of a call by the policies of routing.py. Ray Serve's ReplicaRouter asks it."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from nanopage.server.images import TOKENS
from nanopage.server.routing import Router

PART = 256  # bytes of a prompt, as JSON, that the router compares as one part
PART_TOKENS = PART // 4
MAX_PARTS = 1024  # in a prompt
OUTPUT_TOKENS = 256  # a guess at the output of a request that does not limit it
MAX_OUTPUT_TOKENS = 1024  # the guess for higher limits: most limits are far above what is needed
IMAGE = re.compile(rb'"data:image/[\w.+-]+;base64,[^"]*"|(?<="data":)"[A-Za-z0-9+/=]{1000,}"')  # as JSON


@dataclass(eq=False)
class Route:
    """The replica that runs a call, and how many of its tokens are still outstanding."""

    router: Router
    parts: list[bytes]  # of the prompt, as `Router.choose` takes them
    num_tokens: int  # of the call, as `Router.choose` takes them
    dead: set[str]  # replicas that have died, even if Ray Serve still lists them
    num_prompt_tokens: int = 0  # how many of `num_tokens` belong to the prompt
    exclude: set[str] = field(default_factory=set)
    replica: str | None = None
    num_choices: int = 0
    request_router: "ReplicaRouter | None" = None
    _left: int = 0

    def choose(self, replicas: Iterable[str]) -> str | None:
        """Choose one of these replicas, in place of an earlier choice. Returns None if none may get the call."""
        self.end()
        running = set(replicas) - self.dead
        for gone in self.router.loads.keys() - running:
            self.router.remove(gone)
        for replica in running:
            self.router.add(replica)
        try:
            self.replica = self.router.choose(self.parts, PART_TOKENS, self.num_tokens, exclude=[*self.exclude])
        except LookupError:
            return None
        self._left, self.num_choices = self.num_tokens, self.num_choices + 1
        return self.replica

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` tokens of the output that have come. The first call also counts the prompt as done."""
        if num_tokens and self._left == self.num_tokens:
            num_tokens += self.num_prompt_tokens
        num_tokens = min(num_tokens, self._left)
        if self.replica is not None:
            self.router.finish(self.replica, num_tokens)
            self._left -= num_tokens

    def end(self) -> None:
        self.advance(self._left)
        self.replica = None


class ReplicaRouter(RequestRouter):
    """Lets each call choose its replica. Ray Serve makes it, in the process of Front."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        route: Route = pending_request.args[0].route
        route.request_router = self
        chosen = route.choose(by_name)
        return [] if chosen is None else [[by_name[chosen]]]


def prompt_parts(body: dict, salt: str = "") -> tuple[list[bytes], int]:
    """The prompt of a body in parts for `Router.choose`, and an estimate of its tokens. An image counts as TOKENS.

    Args: salt: keeps cached prefixes apart.
    """
    prompt = [body[name] for name in ("instructions", "system", "messages", "input", "prompt") if name in body]
    text = IMAGE.sub(_stand_in, msgspec.json.encode(prompt))
    digest, parts = hashlib.blake2b(f"{salt} {body.get('cache_salt')}".encode(errors="replace"), digest_size=16), []
    for start in range(0, min(len(text) // PART, MAX_PARTS) * PART, PART):
        digest.update(text[start : start + PART])
        parts.append(digest.copy().digest())
    return parts, len(text) // 4 + 1


def _stand_in(image: re.Match[bytes]) -> bytes:
    """A text of TOKENS tokens that depends on an image."""
    digest = hashlib.blake2b(image[0], digest_size=16).hexdigest().encode()
    return digest * (4 * TOKENS // len(digest))


def num_output_tokens(body: dict) -> int:
    """An estimate of the tokens that a body asks for."""
    limits = [body.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens")]
    limit = next((limit for limit in limits if isinstance(limit, int)), OUTPUT_TOKENS)
    prompts, n = body.get("prompt"), body.get("n")
    num_prompts = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return max(0, min(limit, MAX_OUTPUT_TOKENS)) * num_prompts * (n if isinstance(n, int) and n > 0 else 1)
