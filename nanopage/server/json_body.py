"""The JSON of a body, checked once for all endpoints before anything else sees it.

Texts have no lone surrogates, numbers are finite, integers have at most 64 bits, and nothing is nested deeply. So what
a client has sent can always be encoded again, and recursion over it never fails.
"""

import json
import math
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from nanopage.files.model_files import find_surrogate
from nanopage.server.errors import ApiError

MAX_DEPTH = 64  # of arrays and objects
LEAST, MOST = -(2**63), 2**64 - 1  # for integers: the range that JSON encoders of other languages take


class JsonRoute(APIRoute):
    """A route that reads its body with `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_checked(request: Request) -> Response:
            try:
                return await handle(_JsonRequest(request.scope, request.receive))
            except HTTPException as error:  # FastAPI's own, for any exception while it reads the body
                raise error.__cause__ if isinstance(error.__cause__, ApiError) else error from None

        return handle_checked


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


def read_json(body: bytes) -> Any:
    """The value of a body. Raises: ApiError naming the field."""
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        value = _read_to_explain(body)
    else:
        if _is_plain(value):
            return value
    if (fault := _find_fault(value, "")) is not None:
        place, why = fault
        raise ApiError(400, f"{place or 'the body'} {why}", param=place or None)
    return value


def _read_to_explain(body: bytes) -> Any:
    """Parse a body that msgspec refuses, so that the error can name the field."""
    try:
        return json.loads(body, parse_int=lambda digits: int(digits) if len(digits) < 30 else MOST + 1)
    except RecursionError:
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {message}") from None


def _is_plain(value: Any) -> bool:
    """Whether the integers and the depth of a value that msgspec has read are within bounds. Looks at a whole level at
    once, because four megabytes may hold two million integers."""
    level = [[value]]
    for _ in range(MAX_DEPTH + 1):
        items = list(chain.from_iterable([each.values() if type(each) is dict else each for each in level]))
        kinds = set(map(type, items))
        if int in kinds:
            integers = items if len(kinds) == 1 else [item for item in items if type(item) is int]
            if min(integers) < LEAST or max(integers) > MOST:
                return False
        if kinds.isdisjoint((list, dict)):
            return True
        level = [item for item in items if type(item) in (list, dict)]
    return False


def _find_fault(value: Any, place: str, depth: int = 0) -> tuple[str, str] | None:
    """(place, what is wrong there) of the first thing that is out of bounds."""
    if isinstance(value, str):
        return None if find_surrogate(value) < 0 else (place, "has a lone surrogate, which is not valid Unicode")
    if isinstance(value, float):
        return None if math.isfinite(value) else (place, "is not a finite number")
    if isinstance(value, int):
        return None if LEAST <= value <= MOST else (place, "is an integer of more than 64 bits")
    if not isinstance(value, list | dict):
        return None
    if depth == MAX_DEPTH:
        return place, f"is nested more than {MAX_DEPTH} levels deep"
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(key, int):
            inner = f"{place}[{key}]"
        else:
            inner = f"{place}.{key[:50]}" if place else key[:50]
            if find_surrogate(key) >= 0:
                return place, "has a field whose name has a lone surrogate, which is not valid Unicode"
        if (fault := _find_fault(item, inner, depth + 1)) is not None:
            return fault
    return None
