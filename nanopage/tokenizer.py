"""Text to token ids and back: a thin layer over `tokenizers`, the chat template, and an incremental detokenizer."""

from pathlib import Path

from tokenizers import Tokenizer as BackendTokenizer

from nanopage.chat_template import render
from nanopage.gguf_checkpoint import GGUFCheckpoint
from nanopage.model_files import read_json

REPLACEMENT = "\ufffd"  # what bytes that are no character decode to


class Tokenizer:
    """The tokenizer and chat template of a model.

    Args:
        path: a directory with tokenizer.json (and tokenizer_config.json, chat_template.jinja), or a .gguf file.

    Raises:
        FileNotFoundError: no tokenizer.json.  ValueError: one that can not be read.
    """

    def __init__(self, path: Path):
        if path.suffix == ".gguf":
            checkpoint = GGUFCheckpoint(path)
            self.backend, config = checkpoint.tokenizer(), checkpoint.tokenizer_config()
        else:
            self.backend, config = _read_tokenizer(path), {}
            if (path / "tokenizer_config.json").exists():
                config = read_json(path / "tokenizer_config.json")
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name in ("bos_token", "eos_token", "unk_token", "pad_token") and value is not None
        }
        self.chat_template = _chat_template(path, config)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: list[dict], chat_template: str | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model was trained to see it, ready for `encode(..., add_special_tokens=False)`.

        Args:
            messages: dicts with "role" and "content" (a string).
            chat_template: Jinja source to use instead of the model's.
            add_generation_prompt: end with the opening of the assistant's reply.

        Raises:
            ValueError: no template, messages of the wrong form, or a template that fails or tries to do what the
                sandbox forbids.
        """
        source = chat_template if chat_template is not None else self.chat_template
        if source is None:
            raise ValueError("the model has no chat template: it is a base model; use generate(), or give a template")
        return render(source, messages, add_generation_prompt, self.special_tokens)


def _read_tokenizer(path: Path) -> BackendTokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} has no tokenizer.json. If it has another kind of tokenizer, convert it with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        return BackendTokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from error


def _chat_template(path: Path, config: dict) -> str | None:
    file = path / "chat_template.jinja"
    if path.is_dir() and file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates; "default" is for chat
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text as they come, and finds its stop strings.

    `text` only ever grows by whole characters: the bytes of an unfinished UTF-8 character are held back, and so is
    any tail that may turn out to be the beginning of a stop string. The concatenation of what `take()` returns is the
    final text.

    Args:
        tokenizer: the model's.
        prompt_token_ids: gives the first tokens their context (a leading space, for SentencePiece).
        stop: strings that end the sequence.
        skip_special_tokens, include_stop_str: as in SamplingParams.
    """

    CONTEXT = 5  # prompt tokens that are enough context for any tokenizer (vLLM uses the same number)

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        stop: list[str],
        skip_special_tokens: bool = True,
        include_stop_str: bool = False,
    ):
        self.tokenizer = tokenizer
        self.stop = stop
        self.skip_special_tokens = skip_special_tokens
        self.include_stop_str = include_stop_str
        self.text = ""
        self._taken = 0  # characters of `text` that take() has returned
        # A token's text depends on its neighbours, so new tokens are decoded behind a few known ones. `_done` is how
        # much of the window's text is known; a slide of the window leaves the tokens from `_next` on.
        self._window = self._context(prompt_token_ids)
        self._next = len(self._window)
        self._prompt_text = self._decode()
        self._done = len(self._prompt_text.rstrip(REPLACEMENT))
        self._unfinished = False  # whether tokens were added that are not all in `text`

    def add(self, token_ids: list[int], search_stop: bool = True) -> str | None:
        """Take in new tokens. Returns the stop string that ended the text, if one did."""
        searched = len(self.text)
        for token_id in token_ids:
            self._window.append(token_id)
            text = self._decode()
            whole = text.rstrip(REPLACEMENT)
            self._unfinished = text != whole
            if not self._unfinished:
                self._pass_prompt(text)
            new = whole[self._done :]
            self.text += new
            self._done += len(new)
            if new and not self._unfinished:  # a window that shows nothing gives the next token no context
                rest = self._window[self._next :]
                # The end of a character that the prompt began is no text of its own.
                if not self.tokenizer.decode(rest, self.skip_special_tokens).startswith(REPLACEMENT):
                    self._window = rest
                self._next, self._prompt_text = len(self._window), ""
                self._done = len(self._decode())
        return self._find_stop(searched) if self.stop and search_stop else None

    def finish(self) -> None:
        """No more tokens: an unfinished character becomes the replacement character, as in `Tokenizer.decode`."""
        if self._unfinished:
            text = self._decode()
            self._pass_prompt(text)
            self.text += text[self._done :]
            self._unfinished = False

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

    def _pass_prompt(self, text: str) -> None:
        """What the prompt ended in, be it a replacement character, is not output."""
        if text.startswith(self._prompt_text):
            self._done = max(self._done, len(self._prompt_text))

    def take(self, finished: bool) -> str:
        """The text that is certain and has not been taken yet."""
        end = len(self.text) if finished else len(self.text) - self._possible_stop()
        new, self._taken = self.text[self._taken : end], max(self._taken, end)
        return new

    @property
    def taken(self) -> str:
        """All that take() has returned, in one piece."""
        return self.text[: self._taken]

    def _decode(self) -> str:
        return self.tokenizer.decode(self._window, self.skip_special_tokens)

    def _find_stop(self, searched: int) -> str | None:
        """Cut the text at the earliest stop string that ends after the first `searched` characters."""
        found: tuple[int, str] | None = None
        for stop in self.stop:
            at = self.text.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = at, stop
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self.include_stop_str else at]
        self._unfinished = False
        return stop

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = 0
        for stop in self.stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
