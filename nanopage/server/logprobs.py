"""Log-probabilities in the two forms that OpenAI's endpoints have."""

import codecs
from collections.abc import Sequence

from nanopage.outputs import Logprob
from nanopage.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no -inf

Table = dict[int, Logprob]


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], tables: Sequence[Table], num_top: int, as_ids: bool
) -> dict:
    """The form of /v1/chat/completions: an entry for each token, with its raw bytes, even half a character.

    Args: as_ids: name tokens by their ids instead of their text.
    """

    def entry(token_id: int, table: Table) -> dict:
        data = tokenizer.token_bytes(token_id)
        name = f"token_id:{token_id}" if as_ids else data.decode(errors="replace")
        return {"token": name, "logprob": _value(table[token_id]), "bytes": list(data)}

    return {
        "content": [
            entry(token_id, table) | {"top_logprobs": [entry(top, table) for top in _likeliest(table, num_top)]}
            for token_id, table in zip(token_ids, tables, strict=True)
        ],
        "refusal": None,
    }


class TextOffsets:
    """Where tokens begin in a text, in characters. A character that is spread over several tokens belongs to the last.

    Args:
        hidden: tokens that are not part of the text.
        num_shown: how many of the first tokens are part of the text even if they are `hidden`.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], num_shown: int = 0):
        self.tokenizer, self.hidden, self.num_shown, self.length = tokenizer, hidden, num_shown, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self.length
        self.num_shown -= 1
        if self.num_shown >= 0 or token_id not in self.hidden:
            self.length += len(self._decoder.decode(self.tokenizer.token_bytes(token_id)))
        return offset


def completion_logprobs(
    offsets: TextOffsets, token_ids: Sequence[int], tables: Sequence[Table | None], num_top: int, as_ids: bool
) -> dict:
    """The form of /v1/completions: lists of the same length.

    Args:
        offsets: has counted the choice's earlier tokens.
        tables: None for the first token of a prompt, which nothing predicts.
        as_ids: name tokens by their ids instead of their text.
    """

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else _text(offsets.tokenizer, token_id)

    def top(token_id: int, table: Table) -> dict[str, float]:  # the token itself is always there
        return {name(top): _value(table[top]) for top in dict.fromkeys([*_likeliest(table, num_top), token_id])}

    pairs = list(zip(token_ids, tables, strict=True))
    return {
        "text_offset": [offsets.add(token_id) for token_id in token_ids],
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [None if table is None else _value(table[token_id]) for token_id, table in pairs],
        "top_logprobs": [None if table is None else top(token_id, table) for token_id, table in pairs],
    }


def prompt_logprobs(token_ids: Sequence[int], tables: Sequence[Table | None], num_top: int) -> list[dict | None]:
    """vLLM's form for prompts: the `num_top` likeliest tokens and the prompt's own, by their ids. The first is None."""

    def entry(logprob: Logprob) -> dict:
        return {"logprob": _value(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}

    return [
        None
        if table is None
        else {str(top): entry(table[top]) for top in dict.fromkeys([token_id, *_likeliest(table, num_top)])}
        for token_id, table in zip(token_ids, tables, strict=True)
    ]


def _likeliest(table: Table, count: int) -> list[int]:
    """The ids of the `count` likeliest tokens. The table may also have the sampled token, which need not be likely."""
    return sorted(table, key=lambda token_id: -table[token_id].logprob)[:count]


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a key. Part of a character is written as in OpenAI's API, so that different parts differ."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, FLOOR)
