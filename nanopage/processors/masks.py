"""How a request's processors reach the sampler: with its mask, which is found when all tokens before it are known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from nanopage.engine.output_processor import Request
from nanopage.engine.sequence import TokenMask
from nanopage.params import SamplingParams

Processor = Callable[..., Any]


class MaskWithProcessors(bytes):
    """A mask, and what changes the logits that it is for. Workers in other processes would get the mask alone.

    Attributes: calls: of logits, in this order.
    """

    calls: list[Processor]


@dataclass
class ProcessorMask:
    """The `TokenMask` of a completion with processors. There are no drafts: logits depend on known tokens alone.

    Args:
        mask: of its grammar and its reasoning, if there is one.
        processors: each takes the output's token ids and the logits [vocab_size], or the prompt's, the output's and the
            logits, and returns the new logits.
        num_bytes: the length of a mask.
    """

    mask: TokenMask | None
    processors: Sequence[Processor]
    prompt_token_ids: list[int]
    num_bytes: int
    free_until: int = 0
    takes_prompt: list[bool] = field(init=False)

    def __post_init__(self):
        self.takes_prompt = [len(signature(processor).parameters) == 3 for processor in self.processors]

    def allowed(self, output_token_ids: list[int]) -> bytes:
        """See `TokenMask`."""
        mask = None if self.mask is None else self.mask.allowed(output_token_ids)
        found = MaskWithProcessors(mask or b"\xff" * self.num_bytes)
        found.calls = [
            bind(processor, [self.prompt_token_ids, output_token_ids] if takes_prompt else [output_token_ids])
            for processor, takes_prompt in zip(self.processors, self.takes_prompt, strict=True)
        ]
        return found

    def follow(self, output_token_ids: list[int], draft: list[int]) -> list[bytes]:
        """See `TokenMask`."""
        return [self.allowed(output_token_ids)]


def add_processors(refused: str | None, vocab_size: int, request: Request) -> Request:
    """A request whose completions have the processors of its parameters.

    Args: refused: why there can be none. vocab_size: the model's.
    Raises: ValueError for processors where there can be none.
    """
    assert isinstance(request.params, SamplingParams)
    if not (processors := request.params.logits_processors):
        return request
    if refused is not None:
        raise ValueError(f"logits_processors do not work with {refused}")
    for seq in request.group.seqs:
        seq.token_mask = ProcessorMask(seq.token_mask, processors, request.prompt_token_ids, -(-vocab_size // 32) * 4)
    return request


def bind(processor: Processor, token_ids: list[list[int]]) -> Processor:
    """A function of logits alone. The processor gets copies of the lists, because they are the engine's."""
    return lambda logits: processor(*map(list, token_ids), logits)
