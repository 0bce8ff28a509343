"""Hostile values at every field of every body: none is a 5xx, and the engine goes on."""

import asyncio
import itertools
import json

import pytest
from asgi import call
from encoders import tiny_encoder

from nanopage import AsyncLLM, EngineArgs
from nanopage.server import json_body, protocol
from nanopage.server.adapters import LoadBody, UnloadBody
from nanopage.server.app import create_app
from nanopage.server.message_body import CountBody, MessagesBody
from nanopage.server.state import ServerState

STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DEEP = "[" * 940 + "]" * 940
# As JSON, because Python cannot write some of them.
VALUES = [
    *("1" + "0" * 309, "-1" + "0" * 5000, str(2**63), str(-(2**63) - 1), str(2**64 - 1), "-1", "0", "1", "16.0"),
    *("1e308", "1e999", "NaN", "true", '""', '"\\ud800"', '"a"', DEEP, '{"a": ' * 940 + "1" + "}" * 940),
    *("[]", "{}", "[1" + "0" * 309 + "]", "[-1]", '["a\\udfff"]', '{"\\ud800": 1}'),
    '{"type": "function", "function": {"name": "\\ud800", "arguments": ' + DEEP + "}}",
]
MESSAGE, CALL = {"role": "user", "content": "Hi"}, {"id": "a", "type": "function", "function": {"name": "f"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ITEM = {"type": "message", "role": "user", "content": "Hi"}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {"type": "base64"}}]}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
SHORT = {"max_tokens": 1, "temperature": 0}
# path -> (its body, one that is right, places in it beside the fields of the body)
TEXT = {
    "/v1/chat/completions": (
        protocol.ChatBody,
        {"messages": [MESSAGE], **SHORT},
        {
            **{f"messages.0.{name}": {} for name in ("role", "content", "name", "tool_calls", "x", "reasoning")},
            "messages.0.content": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            "messages.0.content.0.text": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            **{
                f"messages.0.tool_calls.0.{name}": {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}
                for name in ("id", "type", "function", "function.name", "function.arguments", "x")
            },
            **{
                f"tools.0.{name}": {"tools": [TOOL]}
                for name in ("type", "function.name", "function.parameters", "function.parameters.type", "function.x")
            },
            "logit_bias.5": {"logit_bias": {}},
            "logit_bias.1" + "0" * 309: {"logit_bias": {}},
            "stream_options.include_usage": {"stream": True, "stream_options": {}},
            "structured_outputs.choice": {"structured_outputs": {}},
            "structured_outputs.json": {"structured_outputs": {}},
            "response_format.json_schema": {"response_format": {"type": "json_schema"}},
            "chat_template_kwargs.enable_thinking": {"chat_template_kwargs": {}},
            "an unknown field": {},
        },
    ),
    "/v1/completions": (protocol.CompletionBody, {"prompt": "Hi", **SHORT}, {"prompt.0": {"prompt": [1]}}),
    "/v1/responses": (
        protocol.ResponsesBody,
        {"input": "Hi", "max_output_tokens": 1, "temperature": 0},
        {
            **{f"input.0.{name}": {"input": [ITEM]} for name in ("type", "role", "content", "x", "call_id", "output")},
            "metadata.a": {"metadata": {}},
            "text.format": {"text": {}},
            "tools.0.name": {"tools": [{"type": "function"}]},
            "tool_choice.name": {"tool_choice": {"type": "function"}},
        },
    ),
    "/v1/messages": (
        MessagesBody,
        {"messages": [MESSAGE], **SHORT},
        {
            **{f"messages.0.{name}": {} for name in ("role", "content", "x")},
            **{
                f"messages.0.content.0.{name}": {"messages": [{"role": "user", "content": [RESULT]}]}
                for name in ("type", "tool_use_id", "content", "is_error", "content.0.type", "content.0.source.data")
            },
            **{
                f"messages.0.content.0.{name}": {"messages": [{"role": "assistant", "content": [USE]}, MESSAGE]}
                for name in ("type", "id", "name", "input", "input.a")
            },
            **{f"tools.0.{name}": {"tools": [{"name": "f", "input_schema": {}}]} for name in ("name", "input_schema")},
            "tool_choice.type": {"tool_choice": {}},
            "thinking.type": {"thinking": {}},
            "thinking.budget_tokens": {"thinking": {"type": "enabled"}},
            "output_config.format": {"output_config": {}},
            "metadata.user_id": {"metadata": {}},
            "context_management.edits": {"context_management": {}},
        },
    ),
    "/v1/messages/count_tokens": (CountBody, {"messages": [MESSAGE]}, {}),
    "/tokenize": (protocol.TokenizeBody, {"prompt": "Hi"}, {"messages": {"prompt": None}}),
    "/detokenize": (protocol.DetokenizeBody, {"tokens": [1]}, {"tokens.0": {}}),
    "/v1/load_lora_adapter": (LoadBody, {"lora_name": "a", "lora_path": "/nowhere"}, {}),
    "/v1/unload_lora_adapter": (UnloadBody, {"lora_name": "a"}, {}),
}
POOLED = {
    "/v1/embeddings": (protocol.EmbeddingBody, {"input": "Hi"}, {"input.0": {"input": [1]}}),
    "/v1/score": (protocol.ScoreBody, {"text_1": "Hi", "text_2": ["a"]}, {"text_2.0": {}}),
    "/v1/rerank": (protocol.RerankBody, {"query": "Hi", "documents": ["a"]}, {"documents.0.text": {"documents": [{}]}}),
}


def bodies(kind, right, places):
    """(place, body) of every hostile value at every place, and the body with two of them."""
    places = {name: {} for name in kind.model_fields} | places
    for place, fields in places.items():
        for value in VALUES:
            body = json.loads(json.dumps(right | fields))
            *path, last = place.split(".")
            inner = body
            for part in path:
                inner = inner[int(part)] if part.isdigit() and isinstance(inner, list) else inner[part]
            inner[int(last) if isinstance(inner, list) else last] = "HERE"
            yield place, json.dumps(body).replace('"HERE"', value).encode()


async def attack(app, path, wrong):
    """Post bodies, a few at a time. Returns those that were answered with 5xx, or with a stream that does not end."""
    found = []

    async def post(place, body):
        reply = await call(app, "POST", path, body)
        streams = reply.headers.get("content-type", "").startswith("text/event-stream")
        if reply.status >= 500 or (streams and not reply.body.endswith((b"data: [DONE]\n\n", STOP))):
            found.append((place, body[:300], reply.status, reply.body[:300]))
        elif streams:
            assert b"server_error" not in reply.body and b"failed" not in reply.body, (place, body[:300])

    while part := list(itertools.islice(wrong, 32)):
        await asyncio.gather(*(post(place, body) for place, body in part))
    return found


@pytest.mark.parametrize("path", TEXT)
def test_no_value_of_a_text_endpoint_is_a_fault_of_the_server(llm, path):
    app = create_app(ServerState(["tiny"], llm=llm, allow_runtime_lora_updating=True), hosts=["localhost"])
    kind, right, places = TEXT[path]
    before = asyncio.run(call(app, "POST", "/v1/completions", {"prompt": "Hi", "temperature": 0}))
    assert asyncio.run(attack(app, path, bodies(kind, right, places))) == []
    after = asyncio.run(call(app, "POST", "/v1/completions", {"prompt": "Hi", "temperature": 0}))
    assert after.status == 200 and after.json["choices"] == before.json["choices"]


def test_no_value_of_a_pooling_endpoint_is_a_fault_of_the_server(tmp_path):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_encoder(tmp_path, num_labels=1)), device="cpu"))
    app = create_app(ServerState(["tiny"], llm=llm), hosts=["localhost"])
    for path, (kind, right, places) in POOLED.items():
        assert asyncio.run(attack(app, path, bodies(kind, right, places))) == []
    assert asyncio.run(call(app, "POST", "/v1/score", {"text_1": "a", "text_2": "b"})).status == 200
    llm.shutdown()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"max_tokens": 1' + b"0" * 309 + b"}", "max_tokens"),
        (b'{"max_tokens": -1' + b"0" * 9000 + b"}", "max_tokens"),
        (b'{"a": [{"b": [1, 18446744073709551616]}]}', "a[0].b[1]"),
        (b'{"temperature": NaN}', "temperature"),
        (b'{"logit_bias": {"5": -1e999}}', "logit_bias.5"),
        (b'{"messages": [{"content": "\\ud83d"}]}', "messages[0].content"),
        (b'{"a": {"\\udc00": 1}}', "a"),
        (b'{"a": "\xed\xa0\x80"}', "a"),
        (b'{"stop": ' + b"[" * 64 + b"]" * 64 + b"}", "stop" + "[0]" * 63),
        (b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}", "x" + "[0]" * 63),
        (b"[" * 100_000, None),
        (b'{"a": 1', None),
        (b'{"a": "\xff"}', None),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_out_of_bounds_in_a_body_is_named(body, place):
    with pytest.raises(json_body.ApiError) as raised:
        json_body.read_json(body)
    assert raised.value.status == 400 and raised.value.param == place


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [-9223372036854775808, 18446744073709551615, 1.5e308, -0.0]}',
        '"😀"',
        "[" * 64 + "]" * 64,
        '{"a": "1e999"}',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_is_within_bounds_is_read(text, encoding):
    assert json_body.read_json(text.encode(encoding)) == json.loads(text)
