"""The reply to a call whose route raises an exception."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nanopage.aio.async_llm import EngineDeadError
from nanopage.outputs import EngineAsleepError
from nanopage.server.errors import ApiError, from_http, from_validation, internal_error
from nanopage.server.streaming import ClientGoneError


def add_handlers(app: FastAPI) -> None:
    """Make an error reply of every exception."""
    errors: dict[type[Exception], Callable[[Any], ApiError]] = {
        ApiError: lambda error: error,
        EngineAsleepError: lambda error: ApiError(503, str(error), code="asleep", retry_after=30),
        EngineDeadError: lambda error: ApiError(503, str(error), code="engine_dead", retry_after=30),
        RequestValidationError: from_validation,
        HTTPException: from_http,
        Exception: lambda _: internal_error(),
    }
    for kind, make_error in errors.items():
        app.add_exception_handler(kind, partial(_reply, make_error))
    app.add_exception_handler(ClientGoneError, _reply_to_nobody)


async def _reply(make_error: Callable[[Any], ApiError], request: Request, error: Exception) -> Response:
    return make_error(error).response(request.url.path)


async def _reply_to_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
