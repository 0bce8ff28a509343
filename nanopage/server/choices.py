"""What the endpoints for text have in common: choices, their changes while they stream, and usage."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.server.generation import Generation


@dataclass(slots=True)
class Change:
    """What is new in one choice.

    index: the index of the choice, prompt * n + completion.
    completion: its `delta` is the text.
    num_seen: the number of output tokens in earlier changes.
    """

    index: int
    output: RequestOutput
    completion: CompletionOutput
    num_seen: int


async def changes(generation: Generation, n: int, copies: int) -> AsyncIterator[Change]:
    """The changes of all choices as they come. The last one of a choice has a `finish_reason`.

    Args:
        n: the number of completions of a prompt.
        copies: the number of choices that each completion stands for.
    """
    num_seen: defaultdict[int, int] = defaultdict(int)  # of each completion
    finished = set()
    async for prompt, output in generation:
        for completion in output.outputs:
            number = prompt * n + completion.index
            if number in finished or not (completion.delta or completion.finish_reason):
                continue
            for copy in range(copies):
                yield Change(number * copies + copy, output, completion, num_seen[number])
            num_seen[number] = len(completion.token_ids)
            if completion.finish_reason is not None:
                finished.add(number)


def usage(outputs: Iterable[RequestOutput], copies: int = 1, num_dropped: int = 0) -> dict:
    """The tokens of a call. A prompt counts once, whatever the number of its completions.

    Args:
        num_dropped: output tokens of each completion that the client did not ask for.
    """
    outputs = list(outputs)
    num_prompt = sum(len(output.prompt_token_ids) + len(output.encoder_prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(c.token_ids) - num_dropped for output in outputs for c in output.outputs) * copies
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
