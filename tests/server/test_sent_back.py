"""Conversations as clients send them back: every shape of a reply, with fields that only clients know."""

import dataclasses

import pytest
from asgi import post
from server_process import OPTIONS

from nanopage import AsyncLLM, EngineArgs
from nanopage.server import chat
from nanopage.server.app import create_app

HELLO = [{"role": "user", "content": "Hello there"}]
CHAT = "/v1/chat/completions"
CALLING = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.fixture(scope="module")
def llm(model):
    options = OPTIONS | {"max_model_len": 1024, "num_gpu_blocks_override": 128}  # tools take many tokens
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **options))
    yield llm
    llm.shutdown()


CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": %s'
REPLIES = {  # what the model writes
    "content": "Hi",
    "nothing": "",
    "reasoning": "<think>Well</think>Hi",
    "reasoning alone": "<think>Well",
    "a call": CALL_TEXT % '{"a": 1}}\n</tool_call>',
    "content and calls": "I add. " + CALL_TEXT % '{"a": 1}}\n</tool_call>' + CALL_TEXT % "{}}\n</tool_call>",
    "a cut call": CALL_TEXT % '{"a": "\\ud83d',
    "a call that ends early": CALL_TEXT % "",
    "null": CALL_TEXT % "null}\n</tool_call>",
    "a list": CALL_TEXT % "[1]}\n</tool_call>",
    "a number": CALL_TEXT % "1}\n</tool_call>",
    "a text": CALL_TEXT % '"a"}\n</tool_call>',
    "half an emoji": CALL_TEXT % '{"a": "\\ud83d"}}\n</tool_call>',
}
WITH_TOOLS = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ ARGUMENTS }}{% endfor %}\n{% endfor %}{{ tools }}{# </think> #}"
)
TEMPLATES = {
    "without tools": None,
    "any": WITH_TOOLS.replace("ARGUMENTS", "call.function.arguments | tojson"),
    "objects only": WITH_TOOLS.replace(
        "{{ ARGUMENTS }}", "{% for k, v in call.function.arguments | items %}{% endfor %}"
    ),
    "text only": WITH_TOOLS.replace("ARGUMENTS", "'json' + call.function.arguments"),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", REPLIES)
def test_what_the_server_returns_can_be_sent_back(llm, app, monkeypatch, name, template):
    tokenizer, read, tool = llm.engine.tokenizer, chat.Chat.read, {"name": "add", "parameters": {"type": "object"}}
    plain = tokenizer.chat_template + "{# </think> #}"
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[template] or plain)
    monkeypatch.setattr(
        chat.Chat, "read", lambda self, completion: read(self, dataclasses.replace(completion, text=REPLIES[name]))
    )
    body = {"messages": HELLO, "tools": [{"type": "function", "function": tool}], "max_tokens": 1}
    message = post(app, CHAT, body).json["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "2"} for c in message.get("tool_calls", [])]
    reply = post(app, CHAT, body | {"messages": [*HELLO, message, *results, *HELLO]})
    assert reply.status == 200, (message, reply.body)
    assert "x-ignored-fields" not in reply.headers
    body = {"input": HELLO, "tools": [{"type": "function", **tool}], "max_output_tokens": 1}
    output = post(app, "/v1/responses", body).json["output"]
    assert bool(results) == any(item["type"] == "function_call" for item in output)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "2"}
        for item in output
        if item["type"] == "function_call"
    ]
    reply = post(app, "/v1/responses", body | {"input": [*HELLO, *output, *results, *HELLO]})
    assert reply.status == 200, (output, reply.body)
    assert "x-ignored-fields" not in reply.headers


INNER = [  # fields of a body, and what is ignored of them
    ({"messages": [HELLO[0] | {"id": "1", "timestamp": 1.5, "reasoning_details": [], "images": []}]}, "messages[]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]}, "content[]"),
    ({"messages": [HELLO[0], {"role": "assistant", "x": 1, **CALLING}, *HELLO]}, "messages[].x"),
    ({"tools": [{"type": "function", "x": 1, "function": {"name": "f", "cache_control": {}}}]}, "tools[].x, tools[].f"),
    (
        {"chat_template_kwargs": {"enable_thinking": True, "x": 1}},
        "chat_template_kwargs.enable_thinking, chat_template",
    ),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"reasoning": {"effort": "low", "exclude": True}}, "reasoning.effort, reasoning.exclude"),
]


@pytest.mark.parametrize(("fields", "ignored"), INNER, ids=[text for _, text in INNER])
def test_unknown_fields_inside_a_body_are_listed_or_refused_as_those_of_the_body(state, app, fields, ignored):
    body = {"messages": HELLO, "max_tokens": 1} | fields
    reply = post(app, CHAT, body)
    assert reply.status == 200, reply.body
    listed = reply.headers["x-ignored-fields"]
    assert ignored in listed and "images" not in listed
    reply = post(create_app(dataclasses.replace(state, strict_fields=True)), CHAT, body)
    assert (reply.status, reply.error["code"]) == (400, "unknown_field")
    assert post(app, "/tokenize", {"messages": HELLO} | fields).headers["x-ignored-fields"] == listed


def test_variables_reach_a_template_that_reads_them(llm, app, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", "{{ enable_thinking }} {{ reasoning_effort }}.")

    def prompt(**fields):
        reply = post(app, "/tokenize", {"messages": HELLO} | fields)
        assert "x-ignored-fields" not in reply.headers
        return post(app, "/detokenize", {"tokens": reply.json["tokens"]}).json["prompt"]

    assert prompt(enable_thinking=False, reasoning={"effort": "low"}) == "False low."
    assert prompt(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="high") == "True high."
    for fields, effort in (
        ({}, None),
        ({"reasoning": {"effort": "low"}}, "low"),
        ({"reasoning_effort": "high"}, "high"),
    ):
        reply = post(app, "/v1/responses", {"input": "a", "max_output_tokens": 1} | fields)
        assert (reply.json["reasoning"]["effort"], reply.status) == (effort, 200)
    for fields in ({"reasoning_effort": 5}, {"reasoning": {"effort": 5}}, {"enable_thinking": "no"}):
        assert post(app, CHAT, {"messages": HELLO} | fields).status == 400
