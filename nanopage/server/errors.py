"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}. On /v1/messages, as
Anthropic's clients expect them: {"type": "error", "error": {"type", "message"}}."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nanopage.aio.async_llm import EngineDeadError
from nanopage.outputs import EngineAsleepError

UNION_MEMBER = re.compile(r"str|list\[.*|function-before\[.*")  # as pydantic names them in an error's path
MAX_MESSAGE = 1000  # characters, because a message may quote what the client sent
MAX_PARAM = 200
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC = TYPES | {403: "permission_error", 408: "timeout_error", 413: "request_too_large", 503: "overloaded_error"}


class ClientGoneError(Exception):
    """The client has closed its connection."""


class ApiError(Exception):
    """An error reply.

    Args:
        param: the field that is wrong, such as "messages[2].content".
        code: what a program can test.
        retry_after: seconds after which the client may try again. Without it, clients are told not to retry.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else _shown(self.param, MAX_PARAM)
        return {"error": {"message": _shown(str(self), MAX_MESSAGE), "type": kind, "param": param, "code": self.code}}

    def anthropic_body(self) -> dict:
        kind = ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        details = {} if self.code is None else {"details": {"error_code": self.code}}
        return {"type": "error", "error": {"type": kind, "message": _shown(str(self), MAX_MESSAGE)} | details}

    def response(self, path: str) -> Response:
        """Args: path: the call's, which decides the form."""
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else {"x-should-retry": "false"}
        return json_response(self.anthropic_body() if "/v1/messages" in path else self.body(), self.status, headers)


def _shown(text: str, most: int) -> str:
    """A text that can be encoded, and is not long."""
    return (text if len(text) <= most else text[:most] + "...").encode(errors="replace").decode()


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def internal_error() -> ApiError:
    """A 500 for what only the log explains."""
    return ApiError(500, "an error of the server: its log says more", code="internal_error")


def invalid(error: Exception, fields: tuple[str, ...]) -> ApiError:
    """A 400 for a ValueError or TypeError of the engine, whose message begins with the name of what is wrong.

    Args: fields: names that may be the `param`. If the prompt is wrong, the `param` is the last of these.
    """
    message = re.sub(r"(/[\w.-]+)+/(?=[\w.-])", "", str(error))  # removes the directories of file names
    if re.match("(the |a )?prompt(?!_name|_embeds|_adapter|_logprobs)", message):
        return ApiError(400, re.sub(r"^prompt_token_ids\b", fields[-1], message), param=fields[-1])
    match = re.match(r"(\w+)(\[(\d+|'\w+')\])*", message)
    if match is None or match[1] not in fields:
        return ApiError(400, message)
    return ApiError(400, message, param=re.sub(r"\['(\w+)'\]", r".\1", match[0]))  # messages[1].content


def unsupported(field: str, why: str) -> ApiError:
    """A 400 for a field that nanopage does not have."""
    return ApiError(400, f"{field} is not supported: {why}", param=field, code="unsupported")


def from_validation(error: RequestValidationError) -> ApiError:
    """Pydantic's error for a body, with the path of the first field that is wrong."""
    first = error.errors()[0]
    path = list(itertools.takewhile(lambda part: not UNION_MEMBER.fullmatch(str(part)), first["loc"][1:]))
    message = first["msg"].removeprefix("Value error, ")
    if not path and first["type"] == "value_error":
        return ApiError(400, message)
    if not path:
        return ApiError(400, "the body must be a JSON object with the content-type application/json")
    param = str(path[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    return ApiError(400, f"{param}: {message}", param=param)


def add_handlers(app: FastAPI) -> None:
    """Make an error reply of every exception that a route raises."""
    codes = {404: "not_found"}
    errors: dict[type[Exception], Callable[[Any], ApiError]] = {
        ApiError: lambda error: error,
        ClientGoneError: lambda _: ApiError(499, "the client has gone"),
        EngineAsleepError: lambda error: ApiError(503, str(error), code="asleep", retry_after=30),
        EngineDeadError: lambda error: ApiError(503, str(error), code="engine_dead", retry_after=30),
        RequestValidationError: from_validation,
        HTTPException: lambda error: ApiError(error.status_code, str(error.detail), code=codes.get(error.status_code)),
        Exception: lambda _: internal_error(),
    }
    for kind, make_error in errors.items():
        app.add_exception_handler(kind, partial(_reply, make_error))


async def _reply(make_error: Callable[[Any], ApiError], request: Request, error: Exception) -> Response:
    return make_error(error).response(request.url.path)


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
