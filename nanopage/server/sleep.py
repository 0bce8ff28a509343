"""/sleep, /wake_up and /is_sleeping, with vLLM's parameters in the query."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.responses import Response

from nanopage.aio.async_llm import AsyncLLM, EngineDeadError
from nanopage.server.errors import ApiError, invalid, json_response
from nanopage.server.live_view import check_site
from nanopage.server.shapes import replies
from nanopage.step import WorkerDiedError

SLEEP_PATHS = ("/sleep", "/wake_up", "/is_sleeping")


def add_sleep(app: FastAPI, require: Callable[[], AsyncLLM]) -> None:
    """Add the routes. Args: require: returns the engine. Raises: ApiError while there is none."""

    @app.post("/sleep", response_class=Response)
    async def sleep(request: Request) -> Response:
        level = _query(request, "level") or ["1"]
        if level == ["2"]:
            raise ApiError(400, "level=2 drops the weights, and no endpoint gives the engine others", param="level")
        if level != ["1"]:
            raise ApiError(400, f"level={level[-1][:20]} is not supported, only 1", param="level")
        return await _do(require().sleep())

    @app.post("/wake_up", response_class=Response)
    async def wake_up(request: Request) -> Response:
        return await _do(require().wake_up(_query(request, "tags") or None))

    @app.get("/is_sleeping", responses=replies(dict[str, bool]))
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await require().is_sleeping()})


def _query(request: Request, name: str) -> list[str]:
    """The values of the only parameter that a route has. Raises: ApiError for another one."""
    check_site(request)
    if unknown := [other for other in request.query_params if other != name]:
        raise ApiError(400, f"there is no parameter {unknown[0][:100]!r}, only {name!r}", param=unknown[0])
    return request.query_params.getlist(name)


async def _do(change: Awaitable[None]) -> Response:
    try:
        await change
    except (EngineDeadError, WorkerDiedError):
        raise
    except ValueError as error:
        raise invalid(error, ("tags",)) from None
    except (RuntimeError, MemoryError) as error:  # such as a request that runs
        raise ApiError(409, str(error), code="cannot_now") from None
    return Response()
