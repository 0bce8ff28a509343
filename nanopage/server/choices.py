"""What the endpoints for text have in common: choices, their changes while they stream, and usage."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.server.generation import Generation


@dataclass(slots=True)
class Change:
    """What is new in one choice.

    index: of the choice: prompt * n + completion.
    num_seen: output tokens that earlier changes had.
    """

    index: int
    output: RequestOutput
    completion: CompletionOutput
    text: str
    num_seen: int


@dataclass(slots=True)
class _Seen:
    num_chars: int = 0
    num_tokens: int = 0
    finished: bool = False


async def changes(generation: Generation, n: int, copies: int) -> AsyncIterator[Change]:
    """The changes of all choices as they come. The last one of a choice has a `finish_reason`.

    Args:
        n: completions that a prompt has.
        copies: choices that each completion stands for.
    """
    seen: dict[tuple[int, int], _Seen] = {}
    async for prompt, output in generation:
        for completion in output.outputs:
            state = seen.setdefault((prompt, completion.index), _Seen())
            text = completion.text[state.num_chars :]
            if state.finished or not (text or completion.finish_reason):
                continue
            for copy in range(copies):
                index = (prompt * n + completion.index) * copies + copy
                yield Change(index, output, completion, text, state.num_tokens)
            state.num_chars, state.num_tokens = len(completion.text), len(completion.token_ids)
            state.finished = completion.finish_reason is not None


def usage(outputs: Iterable[RequestOutput], copies: int = 1, num_dropped: int = 0) -> dict:
    """The tokens of a call. A prompt counts once, whatever the number of its completions.

    Args:
        num_dropped: output tokens of each completion that the client did not ask for.
    """
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(c.token_ids) - num_dropped for output in outputs for c in output.outputs) * copies
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
