"""Tools through the API: OpenAI's SDK, replies and streams, errors. With NANOPAGE_LONG_TESTS=1 the default model's."""

import dataclasses
import json

import jsonschema
import openai
import pytest
from helpers import EOS, LONG, tiny_model
from server_process import serving

from nanopage import LLM

MODEL = "tools"
LENGTH = 1024 if LONG else 4096
CUT = 16 if LONG else 70  # within the arguments
EAGER_TO_END = {} if LONG else {"logit_bias": {EOS: 8}}
QUESTION = [{"role": "user", "content": "What is 17 plus 25? Use the tool."}]


def function(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 99}  # random weights would go on for long
ADD = function("add", a=DIGIT, b=DIGIT)
WEATHER = function("weather", city={"type": "string", "maxLength": 12}, unit={"enum": ["C", "F"]})
NOW = {"type": "function", "function": {"name": "now"}}
BAD_TYPE, BAD_REF = function("f", a={"type": "strin"}), function("g", a={"$ref": "#/no"})
TOOLS = [ADD, WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """A token of the tiny model is a byte or little more: prompts and replies have more of them."""
    if LONG:
        return request.getfixturevalue("default_model")
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def client(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    options = "--dtype", "float32", "--max-model-len", LENGTH, "--served-model-name", MODEL
    with (
        serving(model, *options, log=log) as server,
        openai.OpenAI(base_url=server.wait_until_ready(), api_key="x", max_retries=0) as client,
    ):
        yield client


def ask(client, **options):
    options = {"messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 200} | EAGER_TO_END | options
    return client.chat.completions.create(model=MODEL, **options)


def join(chunks):
    """The message of a stream, as a client adds it up, and how it ended."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            if part.id is not None:
                assert part.index == len(calls) and part.function.arguments == ""
                calls[part.index] = {"id": part.id, "type": "function", "function": {"name": part.function.name}}
                calls[part.index]["function"]["arguments"] = ""
            else:
                assert part.function.arguments and part.function.name is None
                calls[part.index]["function"]["arguments"] += part.function.arguments
        assert reason is None
        reason = choice.finish_reason
    return content, list(calls.values()), reason


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_a_stream_adds_up_to_the_reply(client, choice, reason):
    # A reply goes on as long as it may.
    options = {"tool_choice": choice, "parallel_tool_calls": False, "logit_bias": {EOS: -50}}
    reply = ask(client, **options).choices[0]
    content, calls, streamed_reason = join(ask(client, stream=True, **options))
    assert reply.finish_reason == streamed_reason == reason and reply.message.content is None and content == ""
    (call,), (whole,) = calls, reply.message.tool_calls
    assert call["function"] == whole.function.model_dump() and call["id"] != whole.id
    schema = next(tool for tool in TOOLS if tool["function"]["name"] == call["function"]["name"])["function"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema.get("parameters", {}))


def test_a_loop_of_three_streamed_calls(client):
    messages, results = [*QUESTION], {"add": "42", "weather": "5 degrees", "now": "noon"}
    for name in ("add", "weather", "now"):
        choice = {"type": "function", "function": {"name": name}}
        content, calls, reason = join(ask(client, messages=messages, tool_choice=choice, stream=True))
        assert (content, reason, [call["function"]["name"] for call in calls]) == ("", "stop", [name])
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": results[name]} for call in calls]
    assert json.loads(calls[0]["function"]["arguments"]) == {}  # no parameters
    content, calls, reason = join(ask(client, messages=messages, tool_choice="none", stream=True, max_tokens=8))
    assert content and not calls and reason in ("stop", "length")


def test_the_stream_helper_finds_several_calls(client):
    options = {"model": MODEL, "messages": QUESTION, "tools": [ADD], "temperature": 0, "max_tokens": 600}
    options |= EAGER_TO_END
    with client.chat.completions.stream(tool_choice="required", **options) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == len(message.tool_calls) >= 1
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])


def test_a_cut_call_is_cut_in_its_arguments(client):
    reply = ask(client, tool_choice=NAMED, max_tokens=CUT).choices[0]
    _, calls, reason = join(ask(client, tool_choice=NAMED, max_tokens=CUT, stream=True))
    assert (reply.finish_reason, reason) == ("length", "length")
    (call,), (whole,) = calls, reply.message.tool_calls
    assert call["function"] == whole.function.model_dump()


def test_a_reply_without_calls_may_have_a_form(client):
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema | {"additionalProperties": False}}}
    message = ask(client, response_format=form, tools=[NOW]).choices[0].message
    if message.tool_calls:
        assert json.loads(message.tool_calls[0].function.arguments) == {}
    else:
        jsonschema.validate(json.loads(message.content), schema)


def test_strict_tools_leave_the_model_the_choice(client):
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}
    reply = ask(client, tools=[strict], max_tokens=40, n=2, temperature=1, seed=3)
    for choice in reply.choices:
        for call in choice.message.tool_calls or []:
            json.loads(call.function.arguments if choice.finish_reason == "tool_calls" else "{}")


def test_responses_call_functions(client):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    options = {"model": MODEL, "tools": tools, "temperature": 0, "max_output_tokens": 200}
    question = {"role": "user", "content": QUESTION[0]["content"]}
    forced = {"tool_choice": {"type": "function", "name": "add"}}
    reply = client.responses.create(input=[question], **options, **forced)
    (call,) = reply.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    with client.responses.stream(input=[question], **options, **forced) as stream:
        events = [event for event in stream if "arguments" in event.type]
        (streamed,) = stream.get_final_response().output
    assert "".join(event.delta for event in events[:-1]) == events[-1].arguments == streamed.arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    options |= {"tool_choice": "none", "max_output_tokens": 8}
    answer = client.responses.create(input=[question, call.model_dump(), output], **options)
    assert answer.output[0].type == "message" and answer.output_text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [ADD, BAD_TYPE], "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"tools": [BAD_REF], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"tool_choice": NAMED, "extra_body": {"structured_outputs": {"json": {}}}}, "structured_outputs"),
        (
            {"tool_choice": "required", "extra_body": {"structured_outputs": {"json_object": True}}},
            "structured_outputs",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
    ],
)
def test_a_wrong_field_is_named(client, options, param):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            ask(client, stream=stream, **options)
        assert raised.value.body["param"] == param, raised.value.body


def test_tools_offline_are_those_of_the_server(model, client):
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=LENGTH, enforce_eager=True)
    params = dataclasses.replace(llm.get_default_sampling_params(), temperature=0, max_tokens=16)
    (output,) = llm.chat(QUESTION, params, tools=TOOLS[:2], use_tqdm=False)
    reply = ask(client, tools=TOOLS[:2], max_tokens=16, logit_bias={})
    assert reply.usage.prompt_tokens == len(output.prompt_token_ids)
    (read,) = llm.read_replies(output, TOOLS[:2])
    assert read.content == (reply.choices[0].message.content or "")
    output.outputs[0].text = '<tool_call>{"name": "now"}</tool_call>'
    assert [call.name for call in llm.read_replies(output, TOOLS)[0].calls] == ["now"]
    with pytest.raises(ValueError, match="tools"):
        llm.read_replies(output, [{}])
