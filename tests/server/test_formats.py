"""response_format, structured_outputs and text.format: replies keep to their form, and errors name the field."""

import asyncio
import json
import re
import threading
from types import SimpleNamespace

import jsonschema
import pytest
from asgi import post
from test_api import CHAT, HELLO, TEXT

from nanopage import SamplingParams, StructuredOutputsParams
from nanopage.grammar import structured as structured_module
from nanopage.server.errors import ApiError
from nanopage.server.message_body import MessagesBody
from nanopage.server.messages import Messages
from nanopage.server.protocol import ResponsesBody
from nanopage.server.responses import Responses
from nanopage.server.state import ServerState

RESPONSES = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
LESS_SPACE = {"200": -30, "201": -30, "204": -30, "223": -30, "2": 9}  # white space; end-of-sequence
ASK = {"seed": 1, "max_tokens": 60, "logit_bias": LESS_SPACE}


def choice(reply):
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


def test_a_chat_follows_a_json_schema_also_when_it_streams(app):
    body = {"messages": HELLO, **ASK, "response_format": JSON_SCHEMA}
    whole = choice(post(app, CHAT, body))
    assert whole["finish_reason"] == "stop"
    jsonschema.validate(json.loads(whole["message"]["content"]), SCHEMA)
    events = post(app, CHAT, body | {"stream": True}).events
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == whole["message"]["content"]


def test_a_json_object_and_plain_text(app):
    body = {"messages": HELLO, **ASK}
    content = choice(post(app, CHAT, body | {"response_format": {"type": "json_object"}}))["message"]["content"]
    assert content.startswith("{")
    plain = choice(post(app, CHAT, body))
    for neutral in ({"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}}):
        assert choice(post(app, CHAT, body | neutral)) == plain


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[a-f]{5}"}, "[a-f]{5}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, "a[bc]"),
        ({"json": {"type": "boolean"}, "regex": None}, "true|false"),
        ({"json": '{"enum": [1, 2]}', "disable_any_whitespace": True}, "1|2"),
    ],
    ids=str,
)
def test_structured_outputs_of_all_endpoints_are_those_of_the_offline_engine(app, offline, structured, pattern):
    text = choice(post(app, TEXT, {"prompt": "the cat", **ASK, "structured_outputs": structured}))["text"]
    bias = {int(token): bias for token, bias in LESS_SPACE.items()}
    params = SamplingParams(
        seed=1, max_tokens=60, logit_bias=bias, structured_outputs=StructuredOutputsParams(**structured)
    )
    assert text == offline.generate("the cat", params, use_tqdm=False)[0].outputs[0].text
    chat = choice(post(app, CHAT, {"messages": HELLO, **ASK, "n": 3, "structured_outputs": structured}))
    response = post(app, RESPONSES, {"input": "Hello", "max_output_tokens": 60, "structured_outputs": structured}).json
    for each in (text, chat["message"]["content"], response["output"][0]["content"][0]["text"]):
        assert re.fullmatch(pattern, each)


def test_a_response_follows_its_format_and_returns_it(app):
    form = {"type": "json_schema", "name": "answer", "strict": True, "schema": {"enum": ["yes", "no"]}}
    reply = post(app, RESPONSES, {"input": "Hello", "max_output_tokens": 30, "text": {"format": form}}).json
    assert reply["status"] == "completed" and reply["text"]["format"] == form | {"description": None}
    assert json.loads(reply["output"][0]["content"][0]["text"]) in ("yes", "no")


def test_several_prompts_share_a_constraint(app):
    body = {"prompt": ["the cat", "the dog"], "n": 2, **ASK, "structured_outputs": {"regex": "[0-9]{3}"}}
    reply = post(app, TEXT, body).json
    assert len(reply["choices"]) == 4 and all(re.fullmatch("[0-9]{3}", each["text"]) for each in reply["choices"])


def schema(inner) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": inner}}}


WRONG = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
        "response_format.json_schema.x",
    ),
    (schema({"type": "strin"}), "response_format"),
    (schema({"uniqueItems": True}), "response_format"),
    (schema({"$ref": "file:///etc/passwd"}), "response_format"),
    (schema({"enum": ["x" * 200_000]}), "response_format"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
    ({"structured_outputs": "a"}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, **schema({})}, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_a_wrong_form_is_a_400_that_names_the_field(app, fields, param):
    for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": ["a", "b"]})):
        for stream in (False, True):
            reply = post(app, path, prompt | fields | {"stream": stream})
            assert (reply.status, reply.error["param"]) == (400, param), reply.body
            assert reply.headers["x-should-retry"] == "false"
            assert len(reply.body) < 2000


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({}, "text.format.type"),
        ({"type": "json_schema", "schema": {"type": "strin"}}, "text.format"),
        ({"type": "json_schema", "name": "a"}, "text.format.schema"),
        ({"type": "json_schema", "schema": {}, "x": 1}, "text.format.x"),
        ({"type": "json_object", "x": 1}, "text.format.x"),
    ],
)
def test_a_wrong_format_of_a_response_is_named(app, form, param):
    reply = post(app, RESPONSES, {"input": "Hello", "text": {"format": form}})
    assert (reply.status, reply.error["param"]) == (400, param), reply.body


def test_a_response_does_not_ignore_a_response_format(app):
    reply = post(app, RESPONSES, {"input": "Hello", "response_format": JSON_SCHEMA})
    assert (reply.status, reply.error["param"]) == (400, "response_format")


def test_a_request_that_leaves_no_token_fails_alone(app):
    async def both():
        loop = asyncio.get_running_loop()
        bad = {"messages": HELLO, **ASK, "structured_outputs": {"regex": "ab"}, "min_tokens": 9}
        good = {"messages": HELLO, **ASK, "structured_outputs": {"regex": "ab"}}
        return await asyncio.gather(*(loop.run_in_executor(None, post, app, CHAT, body) for body in (bad, good)))

    bad, good = asyncio.run(both())
    assert (bad.status, bad.error["code"]) == (500, "request_failed")
    assert choice(good)["message"]["content"] == "ab"


def test_grammars_that_compile_for_long_hold_nobody_up(app, monkeypatch):
    make, answered = structured_module.make_matcher, threading.Event()

    def slow(tokenizer, kind, text, whitespace):
        assert "slow" not in text or answered.wait(60)
        return make(tokenizer, kind, text, whitespace)

    monkeypatch.setattr(structured_module, "make_matcher", slow)
    ask = {"messages": HELLO, **ASK, "structured_outputs": {"choice": ["quick"]}}
    assert choice(post(app, CHAT, ask))["message"]["content"] == "quick"

    async def all_of_them():
        def start(body):
            return asyncio.get_running_loop().run_in_executor(None, post, app, CHAT, body)

        slow = [start(ask | {"structured_outputs": {"choice": [f"slow {i}"]}}) for i in range(4)]
        await asyncio.sleep(0.1)
        for body in ({"messages": HELLO, "max_tokens": 3}, ask):  # the second has a grammar that is kept
            assert (await start(body)).status == 200
        assert not any(each.done() for each in slow)
        answered.set()
        return await asyncio.gather(*slow)

    for i, reply in enumerate(asyncio.run(all_of_them())):
        assert choice(reply)["message"]["content"] == f"slow {i}"


def test_formats_that_are_annotations_are_listed_as_ignored(app):
    number = {"type": "integer", "format": "int64", "enum": [7]}
    inner = {"type": "object", "properties": {"format": number}, "required": ["format"], "additionalProperties": False}
    body = {"messages": HELLO, **ASK, **schema(inner)}
    reply = post(app, CHAT, body)
    assert json.loads(choice(reply)["message"]["content"]) == {"format": 7}
    assert reply.headers["x-ignored-fields"] == "response_format: format int64"
    form = {"format": {"type": "json_schema", "name": "a", "schema": inner}}
    reply = post(app, RESPONSES, {"input": "Hello", "max_output_tokens": 5, "text": form})
    assert reply.headers["x-ignored-fields"] == "text.format: format int64"


COMPLEX = 'start: "x" | "y" ("a" "b"){100000}'


def test_a_grammar_that_becomes_too_complex_is_the_clients_fault(app):
    body = {"messages": HELLO, **ASK, "logit_bias": {"91": 90}, "structured_outputs": {"grammar": COMPLEX}}
    reply = post(app, CHAT, body)
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs.grammar"), reply.body
    assert "Too many items" in reply.error["message"] and reply.headers["x-should-retry"] == "false"
    *_, event = post(app, CHAT, body | {"stream": True}).events
    assert (event["error"]["param"], event["error"]["message"]) == (reply.error["param"], reply.error["message"])
    reply = post(
        app, RESPONSES, {"input": "Hello", "structured_outputs": {"grammar": COMPLEX}, "logit_bias": {"91": 90}}
    )
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs.grammar"), reply.body


OBJECT, ANY = {"type": "json_object"}, {"type": "json_schema", "schema": {}}
CALLS = {  # name of the form -> a call that has one
    "text.format": (Responses, ResponsesBody(input="a", text={"format": OBJECT})),
    "output_config.format": (Messages, MessagesBody(messages=HELLO, max_tokens=5, output_config={"format": ANY})),
}


@pytest.mark.parametrize("place", CALLS)
def test_a_form_that_fails_while_it_is_followed_has_the_endpoints_name(llm, place):
    kind, body = CALLS[place]

    async def fail():
        generation = await kind(ServerState(["tiny"], llm=llm), body).start(lambda: None)
        try:
            generation._check(SimpleNamespace(finished=False, error="structured_outputs.json: it is too complex"))
        finally:
            await generation.aclose()

    with pytest.raises(ApiError, match=f"^{place}: it is too complex") as raised:
        asyncio.run(fail())
    assert raised.value.param == place
