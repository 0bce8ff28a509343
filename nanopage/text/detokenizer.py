"""Tokens to text as they come."""

from nanopage.text.reasoning import AnswerSearch
from nanopage.text.stop_strings import StopStrings, StopStringSearch
from nanopage.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what invalid UTF-8 decodes to


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text as they come, and finds its stop strings.

    `text` grows by whole characters: the bytes of an unfinished UTF-8 character are held back. `certain_text` also
    leaves out an end of the text that may be the beginning of a stop string, so it only ever grows.

    Args:
        tokenizer: the model's.
        prompt_token_ids: gives the first tokens their context (a leading space, for SentencePiece).
        stop_strings: the strings that end the sequence, None if there are none.
        skip_special_tokens, include_stop_str: as in SamplingParams.
        reasoning: whether the output begins within the model's reasoning, where no stop string is searched for; it may
            also begin it itself. None: all of the output is searched.
    """

    MAX_UNFINISHED = 32  # tokens of the window: more are not one character, and would cost work for each further token
    CONTEXT = 5  # prompt tokens that are enough context for any tokenizer (vLLM uses the same number)

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        stop_strings: StopStrings | None = None,
        skip_special_tokens: bool = True,
        include_stop_str: bool = False,
        reasoning: bool | None = None,
    ):
        self.tokenizer = tokenizer
        self.prompt_token_ids = prompt_token_ids
        self.stop_strings = stop_strings
        self.skip_special_tokens = skip_special_tokens
        self.include_stop_str = include_stop_str
        self.reasoning = reasoning
        self.restart()

    def restart(self) -> None:
        """Forget all tokens added so far."""
        self.text = ""
        self._search: StopStringSearch | AnswerSearch | None = None
        if self.stop_strings is not None and self.reasoning is None:
            self._search = StopStringSearch(self.stop_strings)
        elif self.stop_strings is not None:
            self._search = AnswerSearch(self.stop_strings, bool(self.reasoning))
        # A token's text depends on its neighbours, so a window of the last few tokens is decoded as a whole. The first
        # `_done` characters of the window's text are known already. Example: after "a" come two tokens, each with one
        # byte of "é". With the first, the window decodes to "a\ufffd", which adds nothing. With the second, it decodes
        # to "aé", which adds "é". Then the window slides: it keeps the tokens from `_next` on, here the two bytes.
        self._window = self._context(self.prompt_token_ids)
        self._next = len(self._window)
        self._prompt_text = self._decode()
        self._done = len(self._prompt_text.rstrip(REPLACEMENT))
        self._unfinished = False  # whether `text` lacks some of the added tokens

    def add(self, token_id: int, search_stop: bool = True) -> str | None:
        """Add the next token. Returns the stop string that ended the text, if one did."""
        if self.skip_special_tokens and token_id in self.tokenizer.special_ids:
            if isinstance(self._search, AnswerSearch):
                self._search.pass_hidden(self.tokenizer.backend.id_to_token(token_id))
            return None  # it has no text, and must not make the window grow
        self._window.append(token_id)
        text = self._decode()
        whole = text.rstrip(REPLACEMENT)
        self._unfinished = text != whole
        if not self._unfinished:
            self._pass_prompt(text)
        new = whole[self._done :]
        self.text += new
        self._done += len(new)
        if len(self._window) - self._next > self.MAX_UNFINISHED:
            new += self._slide_over(text)
        elif new and not self._unfinished:  # tokens without text are no context for the next one
            rest = self._window[self._next :]
            # Tokens that begin within a character do not decode on their own: the window keeps its earlier tokens.
            begins_within = self.tokenizer.decode(rest, self.skip_special_tokens).startswith(REPLACEMENT)
            if not begins_within or len(self._window) > self.MAX_UNFINISHED:
                self._window = rest
            self._next, self._prompt_text = len(self._window), ""
            self._done = len(self._decode())
        found = None if self._search is None else self._search.feed(new, search_stop)
        if found is None:
            return None
        begin, stop = found
        self.text = self.text[: begin + len(stop) if self.include_stop_str else begin]
        self._search, self._unfinished = None, False
        return stop

    def add_all(self, token_ids: list[int]) -> None:
        """Add all tokens at once, for an output that is not streamed. `finish` decodes them."""
        self._window += token_ids
        self._unfinished = True

    def finish(self) -> None:
        """End the text: an unfinished character becomes the replacement character, as in `Tokenizer.decode`."""
        if self._unfinished:
            text = self._decode()
            self._pass_prompt(text)
            self.text, self._unfinished = self.text + text[self._done :], False
        self._search = None

    def certain_text(self) -> str:
        """The text, without an end that may belong to a stop string."""
        return self.text if self._search is None else self.text[: self._search.begun]

    def _context(self, prompt_token_ids: list[int]) -> list[int]:
        """The end of the prompt, from the beginning of a character on. It may end within one."""
        end = len(prompt_token_ids)
        for tail in range(min(4, end + 1)):  # tokens of a last, unfinished character
            for size in range(self.CONTEXT, self.CONTEXT + 4):
                start = max(0, end - tail - size)
                text = self.tokenizer.decode(prompt_token_ids[start : end - tail], self.skip_special_tokens)
                if REPLACEMENT not in text:
                    return prompt_token_ids[start:]
        return prompt_token_ids[-self.CONTEXT :]

    def _slide_over(self, text: str) -> str:
        """Shrink a window of many tokens that does not end with a whole character. Only its last tokens can still
        become one. Returns the text that is now certain."""
        tail = self._window[-self.CONTEXT :]
        tail_text = self.tokenizer.decode(tail, self.skip_special_tokens)
        if is_unfinished := text.endswith(tail_text) and not tail_text.strip(REPLACEMENT):
            text = text[: len(text) - len(tail_text)]
        new = text[self._done :]
        self.text += new
        self._window, self._prompt_text = tail, ""
        self._next, self._done = (0, 0) if is_unfinished else (len(tail), len(tail_text))
        return new

    def _pass_prompt(self, text: str) -> None:
        """Leave the prompt's own text out of the output, even a replacement character at its end."""
        if text.startswith(self._prompt_text):
            self._done = max(self._done, len(self._prompt_text))

    def _decode(self) -> str:
        return self.tokenizer.decode(self._window, self.skip_special_tokens)
