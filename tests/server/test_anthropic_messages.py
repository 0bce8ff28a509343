"""/v1/messages: Anthropic's SDK, Claude Code's calls, conversations as chats, replies, streams and errors."""

import asyncio
import json

import anthropic
import jsonschema
import pydantic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from asgi import call, check, get, read_schema
from helpers import EOS, tiny_model
from server_process import OPTIONS, serving

from nanopage import AsyncLLM, EngineArgs
from nanopage.server import messages
from nanopage.server.app import create_app
from nanopage.server.fields import REFUSED
from nanopage.server.message_body import Conversation, MessagesBody
from nanopage.server.protocol import ChatBody, CompletionBody
from nanopage.server.state import ServerState

PATH, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
BODY = {"messages": HELLO, "max_tokens": 8, **GREEDY}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 99}
SUM = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"], "additionalProperties": False}
ADD = {"name": "add", "description": "Adds.", "input_schema": SUM}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
EVENT = pydantic.TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def llm(model):
    options = OPTIONS | {"max_model_len": 2048, "num_gpu_blocks_override": 300, "max_num_batched_tokens": 256}
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **options))
    yield llm
    llm.shutdown()


def post(app, body, path=PATH, **options):
    return asyncio.run(call(app, "POST", path, body, **options))


def events_of(reply):
    """The events of a stream, which must have their types as names."""
    *parts, end = reply.body.decode().split("\n\n")
    assert end == ""
    pairs = [part.removeprefix("event: ").split("\ndata: ") for part in parts if not part.startswith(":")]
    events = [json.loads(data) for _, data in pairs]
    assert [name for name, _ in pairs] == [event["type"] for event in events]
    return events


def joined(events):
    """The message of a stream, as the documentation says that a client adds it up."""
    message = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}
            name = field.get(delta["type"], "signature")
            block[name] += delta.get(name, delta.get("partial_json"))
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return message


def without_ids(message):
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name not in ("id", "usage")} | {"content": blocks}


# The SDK, against a real server


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--dtype", "float32", "--max-model-len", 4096, "--api-key", "secret", "--served-model-name", "tiny")
    with serving(model, *options, log=log) as server:
        yield server.wait_until_ready().removesuffix("/v1")


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
        yield client


def test_create_stream_count_and_models(client, url):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "extra_body": GREEDY}
    reply = client.messages.create(**options, system="Be brief.")
    (block,) = reply.content
    assert block.type == "text" and block.text and reply.stop_reason == "max_tokens" and reply.id.startswith("msg_")
    with client.messages.stream(**options, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == block.text
        streamed = stream.get_final_message()
    assert streamed.usage.output_tokens == reply.usage.output_tokens == 8
    assert streamed.usage.cache_read_input_tokens > 0
    whole = [usage.input_tokens + usage.cache_read_input_tokens for usage in (reply.usage, streamed.usage)]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    count = client.messages.count_tokens(model="tiny", messages=HELLO, system=system)
    assert whole == [count.input_tokens] * 2
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").type == "model"
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(**options | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].role") as raised:
        client.messages.create(**options | {"messages": [{"role": "tool", "content": "a"}]})
    assert raised.value.type == raised.value.body["error"]["type"] == "invalid_request_error"
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(**options)


def test_async_clients(url):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "extra_body": GREEDY}

    async def crowd():
        # auth_token is sent as Authorization
        async with anthropic.AsyncAnthropic(base_url=url, auth_token="secret", max_retries=0) as client:

            async def streamed():
                async with client.messages.stream(**options) as stream:
                    return await stream.get_final_message()

            return await asyncio.gather(client.messages.create(**options), *(streamed() for _ in range(4)))

    replies = asyncio.run(crowd())
    assert len({reply.content[0].text for reply in replies}) == 1


def test_a_loop_of_calls_and_the_tool_helper(client):
    options = {"model": "tiny", "max_tokens": 300, "extra_body": {"temperature": 0, "logit_bias": {str(EOS): 8}}}
    options |= {"tools": [ADD, NOW]}
    conversation = [*HELLO]
    for choice, content in ((ONE_CALL, "42"), ({"type": "tool", "name": "now"}, [{"type": "text", "text": "noon"}])):
        with client.messages.stream(messages=conversation, tool_choice=choice, **options) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            reply = stream.get_final_message()
        (use,) = reply.content
        assert (reply.stop_reason, use.type) == ("tool_use", "tool_use") and json.loads("".join(pieces)) == use.input
        jsonschema.validate(use.input, {"add": ADD, "now": NOW}[use.name]["input_schema"])
        result = {"type": "tool_result", "tool_use_id": use.id, "content": content, "is_error": content == "42"}
        conversation += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    options |= {"max_tokens": 8, "tool_choice": {"type": "none"}}
    reply = client.messages.create(messages=conversation, **options | {"extra_body": GREEDY})
    assert reply.content[0].type == "text" and reply.stop_reason == "max_tokens"

    calls = []

    @anthropic.beta_tool
    def note(flag: bool) -> str:
        """Takes a note."""
        calls.append(flag)
        return "done"

    options |= {"tools": [note], "tool_choice": ONE_CALL, "max_tokens": 300}
    replies = [*client.beta.messages.tool_runner(messages=HELLO, max_iterations=2, **options)]
    assert [reply.stop_reason for reply in replies] == ["tool_use"] * 2 and all(type(call) is bool for call in calls)
    assert replies[1].usage.input_tokens + replies[1].usage.cache_read_input_tokens > replies[0].usage.input_tokens


def test_parse_returns_an_object_of_the_class(client):
    class Answer(pydantic.BaseModel):
        sure: bool

    reply = client.messages.parse(
        model="tiny", messages=HELLO, max_tokens=100, output_format=Answer, extra_body={"temperature": 0}
    )
    assert isinstance(reply.parsed_output, Answer)


# A call of Claude Code, as public captures of 2026 show it: the same parts, with shorter texts.
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False}


def claude_code(conversation, request=1):
    text = {"type": "string", "description": "What to do"}
    schemas = {
        "Bash": {"command": text, "timeout": {"type": "number"}, "run_in_background": {"type": "boolean"}},
        "Edit": {"file_path": text, "old_string": text, "replace_all": {"type": "boolean", "default": False}},
        "TodoWrite": {"todos": {"type": "array", "items": {"type": "object", "properties": {"id": text}}}},
        "mcp__a_server_with_a_long_name__and_a_tool_whose_name_is_longer_than_that": {"url": text | {"format": "uri"}},
    }
    tools = [
        {"name": name, "description": f"{name}s.", "input_schema": {"type": "object", "properties": fields, **DRAFT}}
        for name, fields in schemas.items()
    ]
    tools[-1] |= EPHEMERAL
    return {
        "model": "tiny",
        "max_tokens": 8,
        "messages": conversation,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37; cch=fa69{request};"},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **EPHEMERAL},
            {"type": "text", "text": "Help the user.\n\n# Environment\n\nPlatform: linux", **EPHEMERAL},
        ],
        "tools": tools,
        "metadata": {"user_id": "user_0784_account_261d_session_b4e5"},
        "thinking": {"type": "enabled", "budget_tokens": 31999} if request == 1 else {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"],
        "extra_body": GREEDY,
    }


def test_claude_codes_calls_get_a_reply_and_the_cached_prefix_of_the_turn_before(client):
    reminder = {"type": "text", "text": "<system-reminder>\nNo tasks yet.\n</system-reminder>"}
    conversation = [{"role": "user", "content": [reminder, {"type": "text", "text": "List the files.", **EPHEMERAL}]}]
    use = {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}}
    use["caller"] = {"type": "direct"}
    thinking = {"type": "thinking", "thinking": "I run ls.", "signature": "unsigned"}
    result = {"type": "tool_result", "tool_use_id": "toolu_01", "content": "a.txt", "is_error": False, **EPHEMERAL}
    left = {"role": "system", "content": "<total_tokens>32000 tokens left</total_tokens>"}
    totals = []
    for number in (1, 2, 3):
        with client.beta.messages.stream(**claude_code(conversation, number)) as stream:
            reply = stream.get_final_message()
        assert reply.stop_reason == "max_tokens" and reply.content
        if number > 1:  # all of the turn before but its last block of the cache
            assert reply.usage.cache_read_input_tokens >= totals[-1] - 32
        totals.append(reply.usage.input_tokens + reply.usage.cache_read_input_tokens)
        conversation.append({"role": "assistant", "content": [thinking, use]})
        conversation.append({"role": "user", "content": [result, {"type": "text", "text": "Go on."}]})
        conversation.append(left)
    count = claude_code(conversation[:1])
    counted = {name: count[name] for name in ("model", "messages", "system", "tools", "thinking", "betas")}
    assert client.beta.messages.count_tokens(**counted).input_tokens == totals[0]


# Conversations as chats


def test_a_conversation_becomes_that_of_a_chat():
    def text(words):
        return {"type": "text", "text": words}

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    conversation = [
        {"role": "system", "content": "One."},
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": [text("there"), linked]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "??"},
                text("I call."),
                use,
                use | {"id": "2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [text("seen:"), image]},
                {"type": "tool_result", "tool_use_id": "2", "content": "no file", "is_error": True},
                {"type": "tool_result", "tool_use_id": "3"},
                text("Go on"),
            ],
        },
        {"role": "system", "content": [text("Later.")]},
        {"role": "assistant", "content": "It"},
    ]
    system = [text("Zero."), text("x-anthropic-billing-header: a=b;")]
    chat = Conversation(MessagesBody(messages=conversation, max_tokens=1, system=system))
    function = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat.messages == [
        {"role": "system", "content": [text("Zero."), text("One.")]},
        {
            "role": "user",
            "content": [text("Hi"), text("there"), {"type": "image_url", "image_url": {"url": "https://a/b.png"}}],
        },
        {
            "role": "assistant",
            "content": [text("I call.")],
            "tool_calls": [{"id": "1", **function}, {"id": "2", **function}],
            "reasoning_content": "Hm",
        },
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": [text("seen:")]},
        {"role": "tool", "tool_call_id": "2", "name": "f", "content": [text("Error:"), text("no file")]},
        {"role": "tool", "tool_call_id": "3", "content": []},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, text("Go on")],
        },
        {"role": "system", "content": [text("Later.")]},
        {"role": "assistant", "content": [text("It")]},
    ]
    assert chat.goes_on and chat.has_system_later
    assert chat.places["messages[6].content[0]"] == "messages[4].content[0].content[1]"
    # A system message becomes part of the user's turn for templates that know it only at the beginning.
    asked = Conversation(MessagesBody(messages=conversation, max_tokens=1), "user").messages
    assert [message["role"] for message in asked[-3:]] == ["tool", "user", "assistant"]
    assert asked[-2]["content"][-1] == text("Later.") and asked[0]["role"] == "system"


def test_system_messages_stay_in_place_or_become_the_users(llm, app, monkeypatch):
    conversation = [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO, {"role": "system", "content": "Be brief"}]
    body = BODY | {"messages": conversation, "max_tokens": 1}
    plain = post(app, body, COUNT).json["input_tokens"]
    assert plain == post(app, {"messages": conversation}, "/tokenize").json["count"]
    strict = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    template = "{% for m in messages %}" + strict + "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", template)
    assert post(app, body).status == 200
    conversation[-2:] = [{"role": "user", "content": "Hello there\nBe brief"}]
    assert post(app, body, COUNT).json["input_tokens"] == post(app, body, "/tokenize").json["count"]


# Replies


def test_a_message_is_that_of_a_chat_and_its_events_add_up_to_it(app):
    chat = post(app, {"messages": HELLO, "max_tokens": 8, **GREEDY}, CHAT).json
    whole, events = post(app, BODY).json, events_of(post(app, BODY | {"stream": True}))
    assert whole["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert without_ids(joined(events)) == without_ids(whole)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    usage = whole["usage"]
    assert usage["output_tokens"] == events[-2]["usage"]["output_tokens"] == 8
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


ENDINGS = [  # what the model writes, fields, and how the message ends
    ("Hello", {}, "Hello", "end_turn", None),
    ("one two three", {"stop_sequences": ["four", "tw"]}, "one ", "stop_sequence", "tw"),
    ("Hello", {"max_tokens": 2}, "He", "max_tokens", None),
    ("", {}, None, "end_turn", None),
    ("a" * 3000, {"max_tokens": 4000, "system": "a" * 1900}, ..., "model_context_window_exceeded", None),
]


@pytest.mark.parametrize(("text", "fields", "expected", "reason", "sequence"), ENDINGS)
def test_how_a_message_ends(app, say, text, fields, expected, reason, sequence):
    body = {"messages": HELLO, "max_tokens": 20, "temperature": 0} | fields
    say(text)
    reply = post(app, body).json
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
    if expected is not ...:
        assert [block["text"] for block in reply["content"]] == ([] if expected is None else [expected])
    say(text)
    assert without_ids(joined(events_of(post(app, body | {"stream": True})))) == without_ids(reply)


def test_the_cache_can_be_filled_without_a_reply_and_a_last_message_goes_on(llm, app):
    llm.engine.reset_prefix_cache()
    body = BODY | {"system": "the cat and the dog " * 5}
    first = post(app, body | {"max_tokens": 0}).json
    assert (first["content"], first["stop_reason"], first["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    second = post(app, body | {"max_tokens": 2}).json
    assert first["usage"]["cache_read_input_tokens"] == 0 and second["usage"]["cache_read_input_tokens"] > 50
    chat = {"continue_final_message": True, "add_generation_prompt": False, **GREEDY, "max_tokens": 4}
    conversation = [*HELLO, {"role": "assistant", "content": "the cat and"}]
    expected = post(app, chat | {"messages": conversation}, CHAT).json["choices"][0]["message"]["content"]
    assert post(app, BODY | {"messages": conversation, "max_tokens": 4}).json["content"][0]["text"] == expected


CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": %s'
CALLS = {  # what the model writes, and the blocks
    CALL_TEXT % '{"a": 1}}\n</tool_call>': [{"a": 1}],
    "I add." + CALL_TEXT % '{"a": 1}}\n</tool_call>' + CALL_TEXT % "{}}\n</tool_call>": ["I add.", {"a": 1}, {}],
    CALL_TEXT % '{"a": "\\ud83d"}}\n</tool_call>': [{"INVALID_JSON": '{"a": "\\ud83d"}'}],
    CALL_TEXT % '{"a": [1, 2': [{"INVALID_JSON": '{"a": [1, 2'}],
}


@pytest.mark.parametrize("text", CALLS)
def test_calls_are_blocks_that_can_be_sent_back(app, say, text):
    body = {"messages": HELLO, "tools": [ADD], "max_tokens": 200, "temperature": 0}
    say(text)
    reply = post(app, body).json
    found = [block.get("text", block.get("input")) for block in reply["content"]]
    assert (found, reply["stop_reason"]) == (CALLS[text], "tool_use")
    say(text)
    events = events_of(post(app, body | {"stream": True}))
    assert [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"] == [
        block["type"] for block in reply["content"]
    ]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "2"}
        for block in reply["content"]
        if block["type"] == "tool_use"
    ]
    again = [*HELLO, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
    say("Hi")
    reply = post(app, body | {"messages": again})
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers


def test_thinking_is_a_block_and_a_variable_of_the_template(llm, app, say, monkeypatch):
    tokenizer = llm.engine.tokenizer
    plain = tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", plain.replace("assistant\n", "assistant\n<think>\n"))
    text, body = "Okay, cats</think>Hello", {"messages": HELLO, "max_tokens": 40, "temperature": 0}
    thought = {"type": "thinking", "thinking": "Okay, cats", "signature": "unsigned"}
    for fields, expected in (
        ({"thinking": {"type": "adaptive"}}, thought),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}, thought | {"thinking": ""}),
    ):
        say(text)
        reply = post(app, body | fields).json
        assert reply["content"] == [expected, {"type": "text", "text": "Hello"}]
        assert reply["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        say(text)
        events = events_of(post(app, body | fields | {"stream": True}))
        assert without_ids(joined(events)) == without_ids(reply)
        kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
        assert ("thinking_delta" in kinds) == (expected == thought)
        assert "signature_delta" in kinds
    for budget, expected in ((4, 4), (40, None)):
        options = {"type": "enabled", "budget_tokens": budget}
        params = messages.Messages(ServerState(["tiny"], llm=llm), MessagesBody(**body, thinking=options)).params
        assert params.thinking_token_budget == expected
    for name in ("enable_thinking", "thinking"):
        monkeypatch.setattr(tokenizer, "chat_template", plain + "{% if " + name + " %}on{% else %}off {% endif %}")
        counts = []
        for kind in ("adaptive", "disabled"):
            reply = post(app, {"messages": HELLO, "thinking": {"type": kind}}, COUNT)
            assert "x-ignored-fields" not in reply.headers
            counts.append(reply.json["input_tokens"])
        assert counts[0] != counts[1], name


# Fields and errors


WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages[0].content[0] is of type 'document'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
        "messages[0].content[0].source.type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a"}}]}]},
        "messages[0].content[0] is not supported: the model reads",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
        "messages[1].content[0].input",
    ),
    (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            ]
        },
        "messages[1] calls tools",
    ),
    ({"system": [{"type": "image"}]}, "system[0] is of type 'image'"),
    ({"system": 5}, "system"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0, "stream": True}, "max_tokens=0"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2.0}, "top_p"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"stop": "a"}, "stop is not supported: use stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 5000}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [NOW, NOW]}, "tools[1].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [NOW | {"defer_loading": True}]}, "tools[0].defer_loading"),
    (
        {"tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "strin"}}}}]}
        | {"tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type='any'"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [NOW]}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"messages": [{"role": "user", "content": "a b " * 3000}]}, "prompt is too long"),
]


@pytest.mark.parametrize(("fields", "begin"), WRONG, ids=[begin for _, begin in WRONG])
def test_a_bad_field_of_a_message_is_named(app, fields, begin):
    reply = post(app, BODY | {"ignore_eos": False} | fields)
    assert reply.status == 400 and reply.headers["x-should-retry"] == "false"
    assert reply.json.keys() == {"type", "error"} and reply.error.keys() - {"details"} == {"type", "message"}
    assert (reply.json["type"], reply.error["type"]) == ("error", "invalid_request_error")
    assert reply.error["message"].startswith(begin)


def test_fields_without_effect_and_those_that_are_refused_or_listed(app):
    accepted = {"metadata": {"user_id": "me"}, "cache_control": {"type": "ephemeral"}, "service_tier": "auto"}
    accepted |= {"tools": [], "speed": "standard", "tool_choice": {"type": "auto"}, "system": []}
    assert "x-ignored-fields" not in post(app, BODY | accepted).headers
    fields = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "diagnostics": {}}
    text = {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}
    listed = post(app, BODY | fields | {"messages": [text]}).headers["x-ignored-fields"]
    assert sorted(listed.split(", ")) == ["diagnostics", "messages[].content[].x", "output_config.effort", "thinking"]
    for name, (neutral, why) in MessagesBody.refused.items():
        reply = post(app, BODY | {"max_tokens": 1, name: ["wrong"]})
        assert reply.status == 400 and reply.error["message"] == f"{name} is not supported: {why}"
        for value in neutral:
            assert post(app, BODY | {"max_tokens": 1, name: value}).status == 200, name
    known = {*MessagesBody.model_fields, *MessagesBody.refused, *REFUSED}
    assert ChatBody.model_fields.keys() | CompletionBody.model_fields.keys() <= known


def test_errors_and_streams_that_fail_have_anthropics_shape(state, app, monkeypatch, caplog):
    state.draining = True
    reply = post(app, BODY)
    assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (503, "overloaded_error", "30")
    state.draining = False
    assert post(app, b"{").error["type"] == "invalid_request_error"
    assert get(app, PATH).error["type"] == "invalid_request_error"
    assert post(create_app(state, api_keys=["a"]), BODY).error["type"] == "authentication_error"
    plain = messages.changes

    async def failing(*arguments):
        async for change in plain(*arguments):
            yield change
            raise RuntimeError("no such thing")

    monkeypatch.setattr(messages, "changes", failing)
    events = events_of(post(app, BODY | {"stream": True}))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error" and len(events) > 3
    assert "no such thing" in caplog.text


def test_replies_and_events_have_the_shape_that_the_sdk_and_openapi_json_say(app, say):
    schema = read_schema(app)
    body = {"messages": HELLO, "tools": [ADD], "max_tokens": 200, "temperature": 0}
    for text in CALLS:
        say(text)
        reply = post(app, body).json
        assert not Message.model_validate(reply, strict=True).model_extra
        say(text)
        events = events_of(post(app, body | {"stream": True}))
        check(schema, PATH, [reply, *events])
        for event in events:
            if event["type"] != "ping":  # the SDK leaves it out
                assert not EVENT.validate_python(event, strict=True).model_extra
    count = post(app, BODY, COUNT).json
    assert not MessageTokensCount.model_validate(count, strict=True).model_extra
    check(schema, COUNT, [count])
    for path in (PATH, COUNT):
        check(schema, path, [post(app, {"messages": 5}, path).json], "default")
