"""What a model may write while it thinks, before its answer.

A grammar holds the answer alone: it begins after `</think>`. A budget ends the reasoning (`thinking_token_budget`):
when it is used up, the tokens of `</think>` are the only ones allowed, and the model goes on with its answer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nanopage.text.reasoning import END_THINK, THINK, knows_reasoning, last_mark
from nanopage.text.tokenizer import Tokenizer

NUM_TAIL = 5  # if a prompt has no special tokens: how many of its last tokens are searched for <think>
MARK, END_MARK = THINK.encode(), END_THINK.encode()


class AnswerMask(Protocol):
    """A `TokenMask` of the answer (engine/sequence.py)."""

    def follow(self, output_token_ids: list[int], draft: list[int]) -> list[bytes]: ...


class ReasoningTokens:
    """How the model of a tokenizer thinks.

    thinks: whether its chat template knows reasoning.
    think: the token `<think>`; None if the model does not think, or if it is several tokens.
    end: the tokens of `</think>`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.end = tokenizer.encode(END_THINK, add_special_tokens=False)

    @property
    def thinks(self) -> bool:
        return any(map(knows_reasoning, (self.tokenizer.chat_template, self.tokenizer.tool_template)))

    @property
    def think(self) -> int | None:
        return self.tokenizer.backend.token_to_id(THINK) if self.thinks else None

    def read(self, prompt: Sequence[int], reasoning: bool | None, budget: int | None) -> tuple[bool, bool]:
        """(whether a prompt ends within the reasoning, whether an output may begin it)

        Args:
            reasoning: the first of the two, if the template of the prompt knows reasoning. None: the prompt shows it.
            budget: as in `MaskAfterReasoning`.

        Raises: ValueError for a budget of a model that does not think, or cannot write `</think>`.
        """
        thinks = self.thinks or reasoning is not None
        mark = last_mark(self.tokenizer, prompt, NUM_TAIL) if thinks else None
        begun = mark == THINK if reasoning is None else reasoning
        if budget is not None and not thinks:
            raise ValueError("thinking_token_budget: the model does not think: its chat template has no <think>")
        if budget is not None and END_MARK not in b"".join(map(self.tokenizer.token_bytes, self.end)):
            raise ValueError("thinking_token_budget: the tokenizer has no tokens for </think>")
        return begun, thinks and mark != END_THINK


@dataclass(frozen=True)
class FreeText:
    """Texts without a grammar. Args: vocab_size: the model's."""

    tokens: ReasoningTokens
    vocab_size: int

    def make_mask(
        self,
        stop_token_ids: Iterable[int],
        prompt_token_ids: Sequence[int] = (),
        reasoning: bool | None = None,
        budget: int | None = None,
    ) -> "MaskAfterReasoning | None":
        """The mask of one completion; None if nothing limits it. Arguments and errors: as `CompiledGrammar`."""
        begun, may_begin = self.tokens.read(prompt_token_ids, reasoning, budget)
        if budget is None or not (begun or may_begin):
            return None
        num_bytes = -(-self.vocab_size // 32) * 4
        thinking = Thinking(begun, None, self.tokens.end, budget, self.tokens.tokenizer.token_bytes, num_bytes)
        return MaskAfterReasoning(None, thinking, lambda matched: b"")


@dataclass(frozen=True)
class Thinking:
    """How a completion thinks.

    begun: whether the prompt ends within the reasoning. Otherwise the output may begin with `<think>`.
    think: that token. None: its text counts, also after white space and if it is several tokens.
    end: the tokens of `</think>`.
    budget: the most tokens that the output may have between the two marks. None: any number.
    token_bytes: the text of a token.
    num_bytes: the length of a mask.
    """

    begun: bool
    think: int | None
    end: Sequence[int]
    budget: int | None
    token_bytes: Callable[[int], bytes]
    num_bytes: int


class MaskAfterReasoning:
    """The `TokenMask` of a completion that may think first. An output that does not begin with `<think>` is an answer
    from its first token on.

    free_until: before this many output tokens, all tokens are allowed.

    Args:
        mask: the mask of the answer. None: any answer is allowed.
        free: the tokens that are allowed while the model thinks, if the output ends with so many bytes of `</think>`.
    """

    def __init__(self, mask: AnswerMask | None, thinking: Thinking, free: Callable[[int], bytes]):
        self.mask, self.thinking, self.free = mask, thinking, free
        self.free_until = 0 if mask is not None or thinking.budget is None else thinking.budget
        # The number of tokens read, how many bytes of `</think>` they end with, and where the answer begins.
        self._read: tuple[int, int, int | None] = (0, 0, None)

    def allowed(self, output_token_ids: list[int]) -> bytes | None:
        """See `TokenMask`."""
        if self.mask is None and self._find_answer(output_token_ids)[2] is not None:
            return None
        return self.follow(output_token_ids, [])[0]

    def follow(self, output_token_ids: list[int], draft: list[int]) -> list[bytes]:
        """See `TokenMask`."""
        start, matched, begin = self._find_answer(output_token_ids)
        if begin is not None:
            return [b""] * (1 + len(draft)) if self.mask is None else self.mask.follow(output_token_ids[begin:], draft)
        if start is not None:
            return self._follow_reasoning(matched, len(output_token_ids) - start, draft)
        if self.mask is None:
            return [b""]  # the draft may begin the reasoning
        masks, think = self.mask.follow(output_token_ids, draft), self.thinking.think or 0
        return [self._to_bytes(int.from_bytes(masks[0], "little") | 1 << think), *masks[1:]]

    def _find_answer(self, output_token_ids: list[int]) -> tuple[int | None, int, int | None]:
        """Where the reasoning begins, how many bytes of `</think>` the output ends with, where the answer begins. None
        for what has not come. Without reasoning, the answer begins at 0."""
        if (start := self._find_start(output_token_ids)) is None or start < 0:
            return None, 0, None if start is None else 0
        num_read, matched, begin = self._read if self._read[0] <= len(output_token_ids) else (0, 0, None)
        num_read = max(start, num_read)
        while begin is None and num_read < len(output_token_ids):
            after, num_read = self._after(matched, output_token_ids[num_read]), num_read + 1
            matched, begin = (0, num_read) if after is None else (after, None)
        self._read = num_read, matched, begin
        return start, matched, begin

    def _find_start(self, output_token_ids: list[int]) -> int | None:
        """Where the reasoning begins; -1 if there is none, None if it is too early to tell."""
        if self.thinking.begun:
            return 0
        if self.thinking.think is not None:
            return None if not output_token_ids else 1 if output_token_ids[0] == self.thinking.think else -1
        text = b""
        for place, token_id in enumerate(output_token_ids, 1):
            text = (text + self.thinking.token_bytes(token_id)).lstrip()
            if text.startswith(MARK):
                return place
            if not MARK.startswith(text):
                return -1
        return None

    def _follow_reasoning(self, matched: int, length: int, draft: list[int]) -> list[bytes]:
        """As `follow`, after so many tokens of reasoning. Ends before `</think>` is complete."""
        masks, budget = [], self.thinking.budget
        for token_id in [*draft, None]:
            forced = None if budget is None or length < budget else self.thinking.end[length - budget]
            masks.append(self.free(matched) if forced is None else self._to_bytes(1 << forced))
            if token_id is None or (masks[-1] and not masks[-1][token_id // 8] >> token_id % 8 & 1):
                break
            if (after := self._after(matched, token_id)) is None:
                break
            matched, length = after, length + 1
        return masks

    def _after(self, matched: int, token_id: int) -> int | None:
        """How many bytes of `</think>` a text ends with after one more token; None if it has all of them."""
        text = END_MARK[:matched] + self.thinking.token_bytes(token_id)
        if END_MARK in text:
            return None
        return next(n for n in range(len(END_MARK) - 1, -1, -1) if text.endswith(END_MARK[:n]))

    def _to_bytes(self, tokens: int) -> bytes:
        return tokens.to_bytes(self.thinking.num_bytes, "little")
