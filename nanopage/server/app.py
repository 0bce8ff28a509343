"""The routes."""

import logging
import time
from collections.abc import Callable, Sized
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

import nanopage
from nanopage.aio.async_llm import AsyncLLM
from nanopage.params import SamplingParams
from nanopage.server import protocol, shapes
from nanopage.server.adapters import LoadBody, UnloadBody, path_of
from nanopage.server.audio import add_audio
from nanopage.server.chat import Chat
from nanopage.server.completions import Completions
from nanopage.server.errors import ApiError, ClientGoneError, add_handlers, invalid, json_response, unsupported
from nanopage.server.fields import ignored_header
from nanopage.server.generation import too_long
from nanopage.server.json_body import JsonRoute
from nanopage.server.live_view import VIEW_PATHS, add_view
from nanopage.server.message_body import OF_TEMPLATES, CountBody, MessagesBody
from nanopage.server.message_shapes import CountReply, MessageEvent, MessageReply, message_replies
from nanopage.server.messages import Messages
from nanopage.server.metrics import metrics_reply
from nanopage.server.middleware import OPEN_PATHS, Gate
from nanopage.server.pages import page_reply
from nanopage.server.pooling import PoolingCall, check_task, embeddings, rerank, score
from nanopage.server.responses import Responses
from nanopage.server.shapes import replies
from nanopage.server.sleep import SLEEP_PATHS, add_sleep
from nanopage.server.state import ServerState
from nanopage.server.streaming import GONE, PING, EventStream, unless_gone, whole_reply
from nanopage.server.templates import chat_prompt, template_kwargs
from nanopage.server.tools import ToolOptions, read_tool_use
from nanopage.text.prompts import PromptTooLongError

logger, calls = logging.getLogger("nanopage"), logging.getLogger("nanopage.calls")

NOT_SERVED = {  # path -> why
    "/pooling": "use /v1/embeddings or /v1/score",
    "/classify": "classes are not served: use LLM.classify",
    "/v1/moderations": "classes are not served: use LLM.classify",
    "/v1/messages/batches": "send each message to /v1/messages",
    "/v1/audio/speech": "the model says nothing",
    "/v1/images/generations": "the model draws nothing",
    "/v1/images/edits": "the model draws nothing",
}


def create_app(
    state: ServerState,
    api_keys: list[str] | None = None,
    hosts: list[str] | None = None,
    public_metrics: bool = False,
    root_path: str = "",
    routes: FastAPI | None = None,
    app: ASGIApp | None = None,
) -> Gate:
    """The server as an ASGI application, behind keys and limits.

    Args:
        api_keys, hosts, root_path: as in Gate.
        public_metrics: /metrics needs no key.
        app: the application that answers, if the engines are in other processes.
        routes: the routes of `app`. Metrics tell their paths apart.
    """
    routes = routes or create_routes(state)
    paths = [route.path for route in routes.routes if hasattr(route, "path")]
    open_paths = [*OPEN_PATHS, *(["/metrics"] if public_metrics else []), *(["/view"] if state.view else [])]
    options = paths, open_paths, root_path, state.sees_images
    return Gate(app or routes, api_keys or [], hosts or [], state.replies, *options)


def create_routes(state: ServerState) -> FastAPI:
    """The routes, without Gate's checks. They need Gate's `scope["nanopage.key"]` and `scope["nanopage.send"]`."""
    app = FastAPI(
        title="nanopage",
        version=nanopage.__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        responses={"default": {"model": shapes.ErrorReply, "description": "An error"}},
    )
    app.router.route_class = JsonRoute

    @app.post("/v1/chat/completions", responses=replies(shapes.ChatReply, shapes.ChatChunk))
    async def chat_completions(body: protocol.ChatBody, request: Request) -> Response:
        return await _generate(state, request, body, Chat)

    @app.post("/v1/completions", responses=replies(shapes.CompletionReply, shapes.CompletionReply))
    async def completions(body: protocol.CompletionBody, request: Request) -> Response:
        return await _generate(state, request, body, Completions)

    @app.post("/v1/responses", responses=replies(shapes.ResponsesReply, shapes.ResponsesEvent))
    async def responses(body: protocol.ResponsesBody, request: Request) -> Response:
        return await _generate(state, request, body, Responses)

    @app.post("/v1/messages", responses=message_replies(MessageReply, MessageEvent))
    async def messages(body: MessagesBody, request: Request) -> Response:
        return await _generate(state, request, body, Messages)

    @app.post("/v1/messages/count_tokens", responses=message_replies(CountReply))
    async def count_tokens(body: CountBody, request: Request) -> Response:
        llm, name = state.require(), state.model_name(body.model)
        check_task(llm, name, request.url.path, body)
        headers = ignored_header(_find_ignored(state, llm, body))
        count = await Messages(state, body).count()
        return json_response({"input_tokens": count}, headers=headers)

    @app.post("/v1/embeddings", responses=replies(shapes.ListReply))
    async def create_embeddings(body: protocol.EmbeddingBody, request: Request) -> Response:
        return await _generate(state, request, body, embeddings)

    @app.post("/v1/score", responses=replies(shapes.ListReply))
    @app.post("/score", responses=replies(shapes.ListReply))
    async def create_scores(body: protocol.ScoreBody, request: Request) -> Response:
        return await _generate(state, request, body, score)

    @app.post("/v1/rerank", responses=replies(shapes.RerankReply))
    @app.post("/v2/rerank", responses=replies(shapes.RerankReply))
    @app.post("/rerank", responses=replies(shapes.RerankReply))
    async def create_ranks(body: protocol.RerankBody, request: Request) -> Response:
        return await _generate(state, request, body, rerank)

    add_audio(app, state)

    @app.get("/v1/models", responses=replies(shapes.ModelList))
    @app.get("/v1/models/", include_in_schema=False)
    async def models() -> Response:
        names = [*state.model_names, *state.adapters.requests]
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
        return json_response({"object": "list", "data": [model_card(state, name) for name in names]} | ends)

    @app.get("/v1/models/{name:path}", responses=replies(shapes.ModelCard))
    async def model(name: str) -> Response:
        return json_response(model_card(state, state.model_name(name)))

    if state.allow_runtime_lora_updating:

        @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
        async def load_lora_adapter(body: LoadBody) -> Response:
            return PlainTextResponse(await state.adapters.load(state.require(), state.model_names, body))

        @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
        async def unload_lora_adapter(body: UnloadBody) -> Response:
            return PlainTextResponse(state.adapters.unload(state.require(), body))

    @app.post("/tokenize", responses=replies(shapes.TokenizeReply))
    async def tokenize(body: protocol.TokenizeBody) -> Response:
        llm = state.require()
        ignored = _find_ignored(state, llm, body)
        state.model_name(body.model)
        ids = await llm.in_thread(_tokenize, llm, body, state.tool_options)
        reply = {"count": len(ids), "max_model_len": llm.engine.max_model_len, "tokens": ids}
        if body.return_token_strs:
            reader = llm.engine.input_processor.prompts
            tokenizer = reader.require_tokenizer("return_token_strs", "a model with a tokenizer")
            reply["token_strs"] = [tokenizer.backend.id_to_token(token_id) for token_id in ids]
        return json_response(reply, headers=ignored_header(ignored))

    @app.post("/detokenize", responses=replies(dict[Literal["prompt"], str]))
    async def detokenize(body: protocol.DetokenizeBody) -> Response:
        llm, ignored = state.require(), body.check_unknown(state.strict_fields)
        state.model_name(body.model)
        vocab_size = llm.engine.model_config.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise ApiError(400, f"tokens: {str(token_id)[:20]} is not in the vocabulary", param="tokens")
        if (tokenizer := llm.engine.tokenizer) is None:
            raise ApiError(404, "the model has no tokenizer", code="no_tokenizer")
        text = await llm.in_thread(tokenizer.decode, body.tokens, False)
        return json_response({"prompt": text}, headers=ignored_header(ignored))

    @app.get("/tokenizer_info", responses=replies(dict[str, str | None]))
    async def tokenizer_info() -> Response:
        tokenizer = state.require().engine.tokenizer
        if tokenizer is None:
            raise ApiError(404, "the model has no tokenizer", code="no_tokenizer")
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        return json_response({"tokenizer_class": "Tokenizer"} | {name: getattr(tokenizer, name) for name in names})

    @app.get("/health", response_class=Response)
    @app.get("/ping", response_class=Response)
    @app.post("/ping", response_class=Response)
    async def health() -> Response:
        state.check_health()
        return Response()

    @app.get("/version", responses=replies(dict[Literal["version"], str]))
    async def version() -> Response:
        return json_response({"version": nanopage.__version__})

    @app.get("/load", responses=replies(dict[Literal["server_load"], int]))
    async def load() -> Response:
        return json_response({"server_load": state.num_active})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return metrics_reply(state, state.metrics())

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_reply(Path(__file__).with_name("page.html"), links_to_view=state.view is not None)

    not_served = dict(NOT_SERVED)
    if state.view is not None:
        add_view(app, state.view, state.require, state.model_names[0])
    else:
        not_served |= dict.fromkeys(VIEW_PATHS, state.no_view)
    if state.allow_sleep:
        add_sleep(app, state.require)
    else:
        not_served |= dict.fromkeys(SLEEP_PATHS, "the server was started without --allow-sleep")
    if not state.allow_runtime_lora_updating:
        why = "the server was started without --allow-runtime-lora-updating"
        not_served |= {"/v1/load_lora_adapter": why, "/v1/unload_lora_adapter": why}
    for path, why in not_served.items():
        app.add_api_route(path, _not_served(path, why), methods=["GET", "POST"], include_in_schema=False)

    add_handlers(app)
    return app


async def _generate(
    state: ServerState,
    request: Request,
    body: protocol.CommonBody | protocol.PoolingBody,
    kind: Callable[..., Chat | Completions | Responses | Messages | PoolingCall],
) -> Response:
    """Run a call that makes text or vectors: admit its requests, then stream or reply as a whole."""
    started, llm = time.perf_counter(), state.require()
    check_task(llm, state.model_name(body.model), request.url.path, body)
    headers = ignored_header(_find_ignored(state, llm, body))
    if state.default_max_tokens is not None and isinstance(body, protocol.CommonBody):
        body.bound(state.default_max_tokens)
    if state.salt_per_key:
        body.cache_salt = f"{request.scope['nanopage.key']} {body.cache_salt or ''}"
    call = kind(state, body)
    entering = [_size(prompt) for prompt in call.prompts]
    state.enter(llm, entering)
    state.num_active += 1

    async def end(how: str) -> None:
        await generation.aclose()
        state.num_active -= 1
        state.num_disconnects += how == GONE
        request.scope["nanopage.call"] = {"id": call.id, "end": how, **generation.tokens}
        calls.info(f"{request.url.path} {call.id}: {how} after {time.perf_counter() - started:.2f} s")

    try:
        # Each request leaves `entering` when it is in the engine, which counts it from then on.
        generation = await unless_gone(request, call.start(lambda: state.leave(entering)))
    except BaseException as error:
        state.num_active -= 1
        state.num_disconnects += isinstance(error, ClientGoneError)
        raise
    finally:
        while entering:
            state.leave(entering)
    if state.tracer is not None:
        generation.on_finish = partial(state.tracer.record, params=call.params, headers=request.headers)
    if body.stream and isinstance(call, Messages):
        return EventStream(call.chunks(generation), ApiError.anthropic_body, headers, end, PING, b"")
    if body.stream and not isinstance(call, PoolingCall):
        failed = call.failed if isinstance(call, Responses) else ApiError.body
        return EventStream(call.chunks(generation), failed, headers, end)

    async def reply() -> Response:
        outputs = await generation.final()
        # Log-probabilities may be megabytes of text.
        return await llm.in_thread(lambda: json_response(call.reply(outputs), headers=headers))

    return await whole_reply(request, reply(), end)


def _find_ignored(state: ServerState, llm: AsyncLLM, body: protocol.Body) -> list[str]:
    """The ignored fields to be listed. Raises: ApiError for a field that is refused."""
    ignored = body.check_unknown(state.strict_fields)
    if isinstance(body, protocol.ChatBody | protocol.ResponsesBody | MessagesBody | protocol.TokenizeBody):
        names = OF_TEMPLATES if isinstance(body, MessagesBody) else {}
        ignored += [names.get(name, name) for name in template_kwargs(llm, body)[1]]
    if ignored and state.strict_fields:
        raise ApiError(400, f"the chat template does not read {ignored[0]}", param=ignored[0], code="unknown_field")
    return ignored


def _size(prompt: Sized | dict) -> int:
    """An estimate of a prompt's tokens: a token of text has about four characters."""
    if isinstance(prompt, dict):
        return sum(map(_size, prompt.values()))
    return len(prompt) // 4 + 1 if isinstance(prompt, str) else len(prompt)


def _tokenize(llm: AsyncLLM, body: protocol.TokenizeBody, options: ToolOptions) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        prompt = chat_prompt(llm, body, read_tool_use(llm, body, options).offered)
        if "multi_modal_data" not in prompt:
            return prompt["prompt_token_ids"]
        raise unsupported("messages", "images become tokens only in a call that makes text")
    try:
        return llm.engine.input_processor.prompts.encode(body.prompt or "", body.add_special_tokens is not False)
    except PromptTooLongError as error:
        raise too_long(llm, error, "prompt") from None
    except (ValueError, TypeError) as error:
        raise invalid(error, ("prompt",)) from None


def model_card(state: ServerState, name: str) -> dict:
    """An entry of /v1/models."""
    llm, adapter = state.llm, state.adapters.requests.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "nanopage",
        "type": "model",  # this and the next two: Anthropic's
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat(),
        "root": state.model_names[0] if adapter is None else path_of(adapter),
        "parent": None if adapter is None else state.model_names[0],
        "max_model_len": None if llm is None else llm.engine.max_model_len,
        "default_sampling_params": {} if llm is None else changed_defaults(llm),
    }


def changed_defaults(llm: AsyncLLM) -> dict[str, Any]:
    """The parameters that the model's generation_config.json sets for requests that leave them out."""
    given, plain = asdict(llm.engine.default_sampling_params), asdict(SamplingParams())
    shown = protocol.SamplingBody.model_fields
    return {name: value for name, value in given.items() if name in shown and value != plain[name]}


def _not_served(path: str, why: str) -> Callable:
    async def answer() -> Response:
        raise ApiError(404, f"{path} is not served: {why}", code="not_served")

    return answer
