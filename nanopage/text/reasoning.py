"""What a model thinks before it answers: `<think>`, the reasoning, `</think>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanopage.text.stop_strings import StopStrings, StopStringSearch

if TYPE_CHECKING:
    from nanopage.text.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"


def knows_reasoning(template: str | None) -> bool:
    """Whether a chat template is that of a model that thinks."""
    return template is not None and (THINK in template or END_THINK in template)


def last_mark(tokenizer: Tokenizer, token_ids: Sequence[int], tail: int | None = None) -> str | None:
    """The last mark in the turn that a prompt ends with: `<think>` if the model is to go on thinking. A turn begins
    behind a special token.

    Args: tail: if there is no special token, look only at this many last tokens. None: look at all tokens.
    """
    marks = {tokenizer.backend.token_to_id(mark) for mark in (THINK, END_THINK)}
    others = tokenizer.special_ids - marks
    begin = next((i + 1 for i in range(len(token_ids) - 1, -1, -1) if token_ids[i] in others), None)
    if begin is None:
        begin = 0 if tail is None else max(0, len(token_ids) - tail)
    text = tokenizer.decode(list(token_ids[begin:]), skip_special_tokens=False)
    opened, closed = text.rfind(THINK), text.rfind(END_THINK)
    return None if opened == closed else THINK if opened > closed else END_THINK


class ReasoningReader:
    """Divides a reply into reasoning and answer while it streams. White space between the two belongs to neither.

    inside: whether the reply is within the reasoning; None while it is too early to tell.

    Args: begun: whether the reply begins within the reasoning. Otherwise `<think>` may begin it.
    """

    def __init__(self, begun: bool):
        self.inside = True if begun else None
        self._held, self._after_mark = "", False

    def feed(self, text: str) -> tuple[str, str]:
        """Read on. Returns (reasoning, answer): what has become certain."""
        text, self._held, reasoning = self._held + text, "", ""
        if self.inside is None:
            start = text.lstrip()
            if THINK.startswith(start[: len(THINK)]) and len(start) < len(THINK):
                self._held = text
                return "", ""
            self.inside = start.startswith(THINK)
            text = start.removeprefix(THINK) if self.inside else text
        if self.inside:
            reasoning, mark, text = text.partition(END_THINK)
            if not mark:
                size = next(n for n in range(len(END_THINK) - 1, -1, -1) if reasoning.endswith(END_THINK[:n]))
                self._held = END_THINK[:size]
                return reasoning.removesuffix(self._held), ""
            self.inside, self._after_mark = False, True
        if self._after_mark:
            text = text.lstrip()
            self._after_mark = not text
        return reasoning, text

    def end(self) -> tuple[str, str]:
        """End the reply. Returns the rest."""
        return (self._held, "") if self.inside else ("", self._held)


class AnswerSearch:
    """A `StopStringSearch` in the answer only.

    Args: begun: as in ReasoningReader.
    """

    def __init__(self, strings: StopStrings, begun: bool):
        self._reader: ReasoningReader | None = ReasoningReader(begun)
        self._search, self._begin = StopStringSearch(strings), 0  # where the answer begins; before that, the length

    @property
    def begun(self) -> int:
        """Where the earliest unfinished match may begin; without one, the text's length."""
        if self._reader is None:
            return self._begin + self._search.begun
        return 0 if self._reader.inside is None else self._begin

    def feed(self, text: str, search: bool = True) -> tuple[int, str] | None:
        """As `StopStringSearch.feed`."""
        if self._reader is not None:
            self._begin += len(text)
            _, text = self._reader.feed(text)
            if not text:
                return None
            self._begin -= len(text)
            self._reader = None
        found = self._search.feed(text, search)
        return None if found is None else (self._begin + found[0], found[1])

    def pass_hidden(self, token: str | None) -> None:
        """Take note of a special token that is not part of the text."""
        if self._reader is not None and token in (THINK, END_THINK):
            self._reader.feed(token)
