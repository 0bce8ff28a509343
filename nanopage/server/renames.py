"""Errors of a chat in the words of an endpoint whose calls become chats: /v1/responses and /v1/messages."""

import re
from collections.abc import Mapping, Sequence

from nanopage.server.errors import ApiError


def renamed(error: ApiError, places: Mapping[str, str], names: Sequence[tuple[str, str]]) -> ApiError:
    """An error whose message and `param` have the endpoint's names of the fields.

    Args:
        places: the paths of messages and their parts in the chat, and their places in the body. Has "messages".
        names: regular expressions of other names, and what replaces them.
    """

    def rename(text: str) -> str:
        if match := re.match(r"messages[\w.\[\]']*", text):
            path = re.sub(r"\['(\w+)'\]", r".\1", match[0])
            known = max((name for name in places if re.match(re.escape(name) + r"(?!\w)", path)), key=len)
            text = places[known] + path[len(known) :] + text[match.end() :]
        for pattern, replacement in names:
            text = re.sub(pattern, replacement, text)
        return text

    message, error.param = rename(str(error)), error.param and rename(error.param)
    error.args = (message,)
    return error
