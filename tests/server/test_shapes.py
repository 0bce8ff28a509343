"""The shape of every reply: OpenAI's SDK knows it, it has the fields that Open Responses requires, and /openapi.json
describes it."""

import copy
import json
import typing

import pytest
from asgi import check, get, post, read_schema
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel
from server_process import OPTIONS

from nanopage import AsyncLLM, EngineArgs
from nanopage.server.app import create_app
from nanopage.server.state import ServerState

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SDK = {CHAT: (ChatCompletion, ChatCompletionChunk), TEXT: (Completion, Completion), RESPONSES: (Response, None)}
EVENTS = {
    typing.get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
}
HELLO = [{"role": "user", "content": "Hello there"}]
SHORT = {"seed": 1, "max_tokens": 6, "ignore_eos": True}
FUNCTION = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
SCHEMA = {"enum": ["yes", "no"]}
# Fields that the SDK does not have: of vLLM, and of Open Responses; and `name`, which its event of a call once had.
OTHERS = {"stop_reason", "reasoning", "reasoning_content", "presence_penalty", "frequency_penalty", "store", "name"}
OTHERS |= {"token_ids", "prompt_token_ids", "prompt_logprobs", "rank", "decoded_token"}
# What Open Responses (openresponses.org, 2026-04-24) requires of every response: more than the SDK's types do.
# fmt: off
REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
}
# fmt: on

THINKS = {"thinks": True}  # the template opens the reasoning
CASES = {
    "chat": (CHAT, {"messages": HELLO, **SHORT}),
    "chat-several": (CHAT, {"messages": HELLO, **SHORT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "chat-logprobs": (CHAT, {"messages": HELLO, **SHORT, "logprobs": True}),
    "chat-stopped": (CHAT, {"messages": HELLO, **SHORT, "stop": [chr(i) for i in range(97, 123)]}),
    "chat-thinks": (CHAT, {"messages": HELLO, **SHORT, **THINKS}),
    "chat-calls": (
        CHAT,
        {"messages": HELLO, "seed": 1, "tools": [{"type": "function", "function": FUNCTION}]}
        | {"tool_choice": "required"},
    ),
    "chat-ids": (CHAT, {"messages": HELLO, **SHORT, "return_token_ids": True}),
    "chat-prompt": (CHAT, {"messages": HELLO, **SHORT, "prompt_logprobs": 1}),
    "text": (TEXT, {"prompt": "the cat", **SHORT}),
    "text-ids": (TEXT, {"prompt": "the cat", **SHORT, "return_token_ids": True}),
    "text-prompt": (TEXT, {"prompt": "the cat", **SHORT, "prompt_logprobs": 0}),
    "text-several": (TEXT, {"prompt": ["the cat", "a dog"], **SHORT, "n": 2, "logprobs": 2, "echo": True}),
    "text-scores": (TEXT, {"prompt": [40, 41, 42], "max_tokens": 0, "logprobs": 0, "echo": True}),
    "response": (RESPONSES, {"input": "Hello", "seed": 1, "ignore_eos": True, "max_output_tokens": 6}),
    "response-fields": (
        RESPONSES,
        {"input": HELLO, "instructions": "Be brief", "max_output_tokens": 4, "metadata": {"a": "b"}, "user": "me"}
        | {"safety_identifier": "x", "prompt_cache_key": "y", "presence_penalty": 0.5, "temperature": 1, "top_p": 0.5}
        | {"parallel_tool_calls": False},
    ),
    "response-format": (
        RESPONSES,
        {"input": "a", "seed": 1, "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    ),
    "response-object": (RESPONSES, {"input": "a", "max_output_tokens": 4, "text": {"format": {"type": "json_object"}}}),
    "response-thinks": (RESPONSES, {"input": "a", "seed": 1, "ignore_eos": True, "max_output_tokens": 4, **THINKS}),
    "response-calls": (
        RESPONSES,
        {"input": "a", "tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "now"}},
    ),
    "response-may-call": (
        RESPONSES,
        {"input": "a", "seed": 1, "max_output_tokens": 4}
        | {"tools": [{"type": "function", "name": "f", "description": "d", "strict": True, **FUNCTION}]},
    ),
}


@pytest.fixture(scope="module")
def serve(model):
    """A function that returns the reply to a body, parsed: an object, or with stream=True a list of the events."""
    llm = AsyncLLM.from_engine_args(
        EngineArgs(model=str(model), **OPTIONS | {"max_model_len": 1024, "num_gpu_blocks_override": 256})
    )
    app = create_app(ServerState(["tiny"], llm=llm), hosts=["localhost"])
    plain = llm.engine.tokenizer.chat_template
    thinking = plain.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"

    def serve(path, body=None, stream=False):
        llm.engine.tokenizer.chat_template = thinking if body and body.get("thinks") else plain
        sent = None if body is None else {name: value for name, value in body.items() if name != "thinks"}
        sent = sent and sent | ({"stream": True} if stream else {})
        reply = get(app, path) if sent is None else post(app, path, sent)
        if not stream or reply.status != 200:
            return reply.json
        parts = [part.rpartition("data: ")[2] for part in reply.body.decode().split("\n\n")]
        assert parts[-2:] == ["[DONE]", ""]
        return [json.loads(part) for part in parts[:-2]]

    serve.llm, serve.app = llm, app
    yield serve
    llm.shutdown()


@pytest.fixture(scope="module")
def schema(serve):
    return read_schema(serve.app)


def parse(path, reply, stream) -> BaseModel:
    """A reply as an object of the SDK's class."""
    kind = SDK[path][stream]
    if path == RESPONSES and stream:
        kind = EVENTS[reply["type"]]
    if (
        path == TEXT
    ):  # the class has no nulls here, but OpenAI sends them: before the last chunk, and for the first token
        reply = copy.deepcopy(reply)
        for choice in reply["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            if choice["logprobs"] is not None:
                for name, value in (("token_logprobs", 0.0), ("top_logprobs", {})):
                    choice["logprobs"][name] = [value if each is None else each for each in choice["logprobs"][name]]
    return kind.model_validate(reply, strict=True)


def unknown(value) -> set[str]:
    """The fields that the SDK's types do not have."""
    if isinstance(value, list):
        return set().union(*map(unknown, value))
    if not isinstance(value, BaseModel):
        return set()
    return set(value.model_extra or ()).union(*(unknown(getattr(value, name)) for name in type(value).model_fields))


def check_response(response):
    assert response.keys() == REQUIRED
    for tool in response["tools"]:
        assert tool.keys() == {"type", "name", "description", "parameters", "strict"}
    if response["text"]["format"]["type"] == "json_schema":
        assert response["text"]["format"].keys() == {"type", "name", "description", "schema", "strict"}
    assert (response["completed_at"] is not None) == (response["status"] == "completed")
    assert (response["incomplete_details"] is not None) == (response["status"] == "incomplete")
    assert (response["usage"] is not None) == (response["status"] in ("completed", "incomplete"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_reply_has_the_shape_that_clients_know(serve, schema, name, stream):
    path, body = CASES[name]
    stream = stream and "prompt_logprobs" not in body  # these do not stream
    usage = {"stream_options": {"include_usage": True}} if stream and path != RESPONSES else {}
    replies = serve(path, body | usage, stream) if stream else [serve(path, body)]
    for reply in replies:
        assert unknown(parse(path, reply, stream)) <= OTHERS, reply
    check(schema, path, replies)
    if path == RESPONSES:
        responses = [reply.get("response") for reply in replies] if stream else replies
        for response in filter(None, responses):
            check_response(response)
        kinds = {"response-thinks": "reasoning", "response-calls": "function_call"}
        assert [item["type"] for item in responses[-1]["output"]] == [kinds.get(name, "message")]
        assert responses[-1]["tool_choice"] == body.get("tool_choice", "auto" if "tools" in body else "none")
        return
    for reply in replies:
        assert reply["system_fingerprint"] == serve.llm.system_fingerprint
        assert not stream or (reply["usage"] is None) == bool(reply["choices"])
        for choice in reply["choices"]:
            assert {"index", "logprobs", "finish_reason"} <= choice.keys()
            assert path == TEXT or stream or choice["message"]["refusal"] is None
            assert path == TEXT or choice["logprobs"] is None or choice["logprobs"]["refusal"] is None


def test_a_response_that_fails_has_the_shape_of_others(serve, schema, monkeypatch):
    worker = serve.llm.engine.executor.worker
    monkeypatch.setattr(worker, "launch", lambda batch: (_ for _ in ()).throw(ValueError("a bad row")))
    events = serve(RESPONSES, {"input": "Hello", "max_output_tokens": 3}, stream=True)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    for event in events:
        parse(RESPONSES, event, True)
        check_response(event["response"])
    assert events[-1]["response"]["error"]["code"] == "server_error"
    check(schema, RESPONSES, events)


def test_events_of_a_response_have_the_fields_of_their_type(serve):
    kinds = set()
    for name in ("response", "response-thinks", "response-calls"):
        for event in serve(*CASES[name], stream=True):
            assert event.keys() <= type(parse(RESPONSES, event, True)).model_fields.keys() | OTHERS
            kinds.add(event["type"].removeprefix("response."))
    parts = {f"{part}.{how}" for part in ("output_item", "content_part") for how in ("added", "done")}
    texts = {f"{text}.{how}" for text in ("output_text", "reasoning_text") for how in ("delta", "done")}
    calls = {"function_call_arguments.delta", "function_call_arguments.done"}
    assert kinds == parts | texts | calls | {"created", "in_progress", "completed", "incomplete"}


def test_other_replies_and_errors_are_what_openapi_json_says(serve, schema):
    check(schema, "/v1/models", [serve("/v1/models")], method="get")
    check(schema, "/v1/models/{name}", [serve("/v1/models/tiny")], method="get")
    Model.model_validate(serve("/v1/models/tiny"), strict=True)
    for path in ("/version", "/load", "/tokenizer_info"):
        check(schema, path, [serve(path)], method="get")
    tokens = serve("/tokenize", {"prompt": "the cat", "return_token_strs": True})
    check(schema, "/tokenize", [tokens, serve("/tokenize", {"messages": HELLO})])
    check(schema, "/detokenize", [serve("/detokenize", {"tokens": tokens["tokens"]})])
    for path, body in (
        (CHAT, {"messages": 5}),
        (TEXT, {"prompt": "a", "temperature": -1}),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        check(schema, path, [serve(path, body)], status="default")
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert operation["responses"].keys() == {"200", "default"}, path
            kind = operation["responses"]["200"].get("content", {}).get("application/json", {"schema": True})
            assert kind["schema"], path  # not untyped


def test_the_openai_sdk_knows_embeddings(tmp_path):
    from encoders import tiny_encoder

    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_encoder(tmp_path)), device="cpu"))
    app = create_app(ServerState(["tiny"], llm=llm), hosts=["localhost"])
    schema = read_schema(app)
    try:
        for path, body in (
            ("/v1/embeddings", {"input": ["a", "b"]}),
            ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
            ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ):
            reply = post(app, path, body).json
            check(schema, path, [reply])
            if path == "/v1/embeddings":
                CreateEmbeddingResponse.model_validate(reply, strict=True)
    finally:
        llm.shutdown()
