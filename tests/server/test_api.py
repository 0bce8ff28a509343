"""The HTTP API in this process: fields, replies, errors, and clients that go away."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time

import pytest
from asgi import call, get, post
from fake_executor import fake_engine
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from server_process import OPTIONS

from nanopage import AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams
from nanopage.aio.engine_thread import EngineThread
from nanopage.grammar.tool_formats import MISTRAL
from nanopage.grammar.tool_reply import ReplyReader
from nanopage.outputs import CompletionOutput, StepStats
from nanopage.server import chat, completions, middleware, protocol, responses, streaming
from nanopage.server.app import NOT_SERVED, create_app
from nanopage.server.chat import Chat
from nanopage.server.fields import REFUSED
from nanopage.server.generation import Change
from nanopage.server.metrics import metrics_reply
from nanopage.server.middleware import share_with
from nanopage.server.protocol import ChatBody, CompletionBody, ResponsesBody
from nanopage.server.state import ServerState
from nanopage.server.tools import ToolOptions, read_tool_use
from nanopage.server.tracing import Tracer
from nanopage.vllm.metrics import Metrics

HELLO = [{"role": "user", "content": "Hello there"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(llm):
    """A state and an application for all tests: its routes take longer to make than most calls."""
    state = ServerState(["tiny", "alias"], llm=llm)
    return state, create_app(state, hosts=["localhost"])


@pytest.fixture
def state(served, llm):
    state = served[0]
    before = vars(state).copy()
    yield state
    asyncio.run(at_rest(llm))
    thread = llm.engine_thread
    assert state.num_active == state.num_entering == thread.num_waiting == thread.num_waiting_tokens == 0
    manager = llm.engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    vars(state).update(before)


@pytest.fixture
def app(served, state):
    return served[1]


async def at_rest(llm) -> None:
    while llm.engine_thread.mail or not llm.engine_thread.idle:
        await asyncio.sleep(0.001)


# Replies


def test_a_chat_gets_the_answer_of_the_offline_engine(app, offline):
    reply = post(app, CHAT, {"model": "tiny", "messages": HELLO, **GREEDY})
    expected = offline.chat(HELLO, SamplingParams(**GREEDY), use_tqdm=False)[0]
    assert reply.status == 200
    (choice,) = reply.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    num_prompt = len(expected.prompt_token_ids)
    usage = reply.json["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
    assert counts == (num_prompt, 8, num_prompt + 8)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert post(app, CHAT, {"messages": HELLO, **GREEDY}).json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("n", [1, 3])
def test_chunks_of_a_chat_add_up_to_its_reply(app, n):
    body = {"messages": HELLO, "seed": 5, "max_tokens": 20, "n": n, "stop": "z"}
    whole = post(app, CHAT, body).json
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = post(app, CHAT, body | {"stream": True, "stream_options": options})
    assert stream.headers["content-type"].startswith("text/event-stream")
    *chunks, last = stream.events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(c["index"], c["delta"]) for c in choices[:n]] == [
        (i, {"role": "assistant", "content": "", "refusal": None}) for i in range(n)
    ]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:n]] == [0] * n
    for options, usages in (({"include_usage": True}, {None}), ({"continuous_usage_stats": True}, set())):
        chunks = post(app, CHAT, body | {"stream": True, "stream_options": options}).events
        assert {chunk["usage"] for chunk in chunks if chunk["choices"] and "usage" in chunk} == usages
        assert (chunks[-1]["choices"] == []) == bool(usages)
    texts, reasons = [""] * n, [None] * n
    for choice in choices[n:]:
        assert reasons[choice["index"]] is None  # nothing follows the end
        if choice["finish_reason"] is None:
            assert choice["delta"].keys() == {"content"} and choice["delta"]["content"]
            texts[choice["index"]] += choice["delta"]["content"]
        else:
            assert choice["delta"] == {}
            reasons[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [(choice["finish_reason"], choice["stop_reason"]) for choice in whole["choices"]]


def test_greedy_choices_are_copies(app):
    one = post(app, CHAT, {"messages": HELLO, **GREEDY}).json
    three = post(app, CHAT, {"messages": HELLO, "n": 3, "best_of": 4, **GREEDY}).json
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in three["choices"]} == {one["choices"][0]["message"]["content"]}
    assert three["usage"]["completion_tokens"] == 24
    chunks = post(app, CHAT, {"messages": HELLO, "n": 3, "stream": True, **GREEDY}).events
    assert [sum(c["choices"][0]["index"] == i for c in chunks) for i in range(3)] == [len(chunks) // 3] * 3


def test_completions_of_prompts_of_every_form(app, offline):
    texts = ["the cat", "the dog is in the house", "a"]
    params = SamplingParams(**GREEDY)
    expected = [output.outputs[0].text for output in offline.generate(texts, params, use_tqdm=False)]
    ids = [offline.engine.tokenizer.encode(text) for text in texts]
    for prompt in (texts, ids):
        choices = post(app, TEXT, {"prompt": prompt, **GREEDY}).json["choices"]
        assert [(c["index"], c["text"]) for c in choices] == list(enumerate(expected))
    for prompt in (texts[0], ids[0]):
        assert post(app, TEXT, {"prompt": prompt, **GREEDY}).json["choices"][0]["text"] == expected[0]


@pytest.mark.parametrize("stream", [False, True])
def test_the_index_of_a_choice_is_prompt_times_n_plus_completion(app, stream):
    body = {"prompt": ["the cat", "the dog"], "n": 2, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    whole = {c["index"]: c["text"] for c in post(app, TEXT, body).json["choices"]}
    assert [*whole] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in post(app, TEXT, body | {"stream": True}).events:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == whole
    alone = post(app, TEXT, body | {"prompt": "the dog"}).json["choices"]
    assert [choice["text"] for choice in alone] == [whole[2], whole[3]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs_scores_the_prompt(app, offline, stream, as_ids):
    text = "the cat é and the other dog"
    ids = offline.engine.tokenizer.encode(text)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=2)
    expected = offline.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
    tables = expected.prompt_logprobs + expected.outputs[0].logprobs
    tokens = ids + expected.outputs[0].token_ids
    for max_tokens in (1, 0):
        body = {"prompt": ids if as_ids else text, "echo": True, "logprobs": 2, "temperature": 0, "stream": stream}
        reply = post(app, TEXT, body | {"max_tokens": max_tokens})
        chunks = reply.events if stream else [reply.json]
        merged = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for chunk in chunks:
            for name, values in merged.items():
                values += chunk["choices"][0]["logprobs"][name]
        num_tokens = len(ids) + max_tokens
        assert {len(values) for values in merged.values()} == {num_tokens}
        assert merged["token_logprobs"][0] is None and merged["top_logprobs"][0] is None
        for i in range(1, num_tokens):
            assert merged["token_logprobs"][i] == tables[i][tokens[i]].logprob
            assert max(merged["top_logprobs"][i].values()) == max(t.logprob for t in tables[i].values())
            if tables[i][tokens[i]].rank == 1:  # what lm-eval's is_greedy tests
                top = merged["top_logprobs"][i]
                assert merged["tokens"][i] == max(top, key=top.get)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(text)
        expected_offsets = [len(offline.engine.tokenizer.decode(ids[:i])) for i in range(len(ids))]
        whole = [i for i in range(len(ids)) if "\ufffd" not in offline.engine.tokenizer.decode(ids[:i])]
        assert [merged["text_offset"][i] for i in whole] == [expected_offsets[i] for i in whole]
        if max_tokens == 0 and not stream:
            assert reply.json["choices"][0]["text"] == text and reply.json["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_top_logprobs_of_a_completion_have_the_sampled_token(app, stream):
    body = {"prompt": "the cat", "temperature": 3, "seed": 1, "max_tokens": 12, "ignore_eos": True, "stream": stream}
    for num_top in (0, 1, 3):
        reply = post(app, TEXT, body | {"logprobs": num_top})
        parts = [chunk["choices"][0]["logprobs"] for chunk in (reply.events if stream else [reply.json])]
        entries = [
            entry
            for part in parts
            for entry in zip(part["tokens"], part["token_logprobs"], part["top_logprobs"], strict=True)
        ]
        assert len(entries) == 12 and all(top[token] == value for token, value, top in entries)
        sizes = {len(top) for *_, top in entries}
        assert num_top + 1 in sizes and sizes <= {num_top, num_top + 1}


def test_chat_logprobs_have_the_bytes_of_every_token(app, offline):
    body = {"messages": HELLO, "seed": 2, "max_tokens": 12, "ignore_eos": True, "logprobs": True}
    plain = post(app, CHAT, body).json["choices"][0]
    entries = plain["logprobs"]["content"]
    assert len(entries) == 12 and all(entry["top_logprobs"] == [] for entry in entries)
    assert b"".join(bytes(e["bytes"]) for e in entries).decode(errors="replace") == plain["message"]["content"]
    assert all(-9999 <= entry["logprob"] <= 0 for entry in entries)
    top = post(app, CHAT, body | {"top_logprobs": 3}).json["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in top] == [3] * 12
    chunks = post(app, CHAT, body | {"top_logprobs": 3, "stream": True}).events
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for part in streamed for entry in part["content"]] == top


def test_a_limit_beyond_the_context_is_clamped_and_the_newer_name_wins(app):
    num_prompt = post(app, "/tokenize", {"messages": HELLO}).json["count"]
    long = {"messages": HELLO, "temperature": 0, "ignore_eos": True}
    assert post(app, CHAT, long | {"max_tokens": 10**9}).json["usage"]["total_tokens"] == 128
    assert post(app, CHAT, long).json["usage"]["completion_tokens"] == 128 - num_prompt
    assert post(app, CHAT, long | {"max_tokens": 9, "max_completion_tokens": 3}).json["usage"]["completion_tokens"] == 3
    body = {"prompt": "the cat", "max_tokens": None, "temperature": 0, "ignore_eos": True}
    assert post(app, TEXT, body).json["usage"]["completion_tokens"] == 16
    assert post(app, TEXT, body | {"max_completion_tokens": 2}).json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("most", [5, 40])
def test_default_max_tokens_bounds_replies_whose_requests_have_no_limit(state, most):
    bounded = create_app(dataclasses.replace(state, default_max_tokens=most))
    free, given = {"temperature": 0, "ignore_eos": True}, most + 3
    chat = {"messages": HELLO, **free}
    assert post(bounded, CHAT, chat).json["usage"]["completion_tokens"] == most
    assert post(bounded, CHAT, chat | {"max_completion_tokens": given}).json["usage"]["completion_tokens"] == given
    text = {"prompt": "the cat", **free}
    assert post(bounded, TEXT, text).json["usage"]["completion_tokens"] == min(most, 16)
    assert post(bounded, TEXT, text | {"max_tokens": given}).json["usage"]["completion_tokens"] == given
    response = {"input": "the cat", **free}
    assert post(bounded, "/v1/responses", response).json["usage"]["output_tokens"] == most
    limited = post(bounded, "/v1/responses", response | {"max_output_tokens": given}).json
    assert limited["usage"]["output_tokens"] == given


def test_every_field_may_be_null(app):
    fields = ("n", "best_of", "temperature", "top_p", "stop", "seed", "logit_bias", "logprobs", "stream_options")
    fields += ("max_tokens", "stop_token_ids", "bad_words", "tools", "response_format", "user", "suffix", "echo")
    assert post(app, TEXT, {"prompt": "a", "model": None, **dict.fromkeys(fields)}).status == 200
    assert post(app, CHAT, {"messages": HELLO, "max_tokens": 2, "top_logprobs": None, "tools": None}).status == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_are_those_of_the_engine(app, offline, path):
    ids, params = [40, 41, 42], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    prompt = {"prompt": ids}
    if path == CHAT:
        prompt = {"messages": HELLO}
        ids = post(app, "/tokenize", prompt).json["tokens"]
    expected = offline.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids
    body = prompt | GREEDY | {"n": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    body |= {"logprobs": True} if path == CHAT else {"logprobs": 0}
    whole = post(app, path, body).json
    events = [event for event in post(app, path, body | {"stream": True}).events if event["choices"]]
    for index in range(2):
        choice = whole["choices"][index]
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert choice["token_ids"] == [i for part in parts for i in part.get("token_ids", ())] == expected
        logprobs = choice["logprobs"]
        names = [each["token"] for each in logprobs["content"]] if path == CHAT else logprobs["tokens"]
        assert names == [f"token_id:{i}" for i in expected]
        if path == TEXT:
            assert [part.get("prompt_token_ids") for part in parts] == [ids] + [None] * (len(parts) - 1)
            assert [*logprobs["top_logprobs"][0]] == names[:1]
        assert (whole if path == CHAT else choice)["prompt_token_ids"] == ids
    if path == CHAT:
        assert [event.get("prompt_token_ids") for event in events] == [ids] * 2 + [None] * (len(events) - 2)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_logprobs_are_those_of_the_engine(app, offline, path):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hello there"}
    ids = post(app, "/tokenize", prompt).json["tokens"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=2)
    expected = offline.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
    reply = post(app, path, prompt | GREEDY | {"prompt_logprobs": 2}).json
    tables = (reply if path == CHAT else reply["choices"][0])["prompt_logprobs"]
    assert tables[0] is None and len(tables) == len(ids)
    for found, table in zip(tables[1:], expected[1:], strict=True):
        assert found == {str(i): dataclasses.asdict(p) for i, p in table.items()}
    for wrong in ({"stream": True, "prompt_logprobs": 0}, {"prompt_logprobs": -1}, {"prompt_logprobs": 21}):
        assert post(app, path, prompt | GREEDY | wrong).error["param"] == "prompt_logprobs"
    if path == TEXT:
        more = GREEDY | {"prompt_logprobs": 1, "logprobs": 2, "echo": True}
        choice = post(app, TEXT, prompt | more).json["choices"][0]
        assert {len(table) for table in choice["prompt_logprobs"][1:]} <= {1, 2}
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 8


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_beam_search_is_that_of_the_offline_engine(app, offline, path):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hello there"}
    ids = post(app, "/tokenize", prompt).json["tokens"]
    params = BeamSearchParams(3, max_tokens=6, length_penalty=0.5)
    (expected,) = offline.beam_search([{"prompt_token_ids": ids}], params, use_tqdm=False)
    body = prompt | {"use_beam_search": True, "n": 3, "max_tokens": 6, "length_penalty": 0.5}
    body |= {"temperature": 0, "top_k": -1, "stop": [], "return_token_ids": True}
    choices = post(app, path, body).json["choices"]
    assert [choice["token_ids"] for choice in choices] == [output.token_ids for output in expected.outputs]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert texts == [output.text for output in expected.outputs] and len({*texts}) > 1
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    if path == TEXT:
        both = post(app, path, body | {"prompt": ["a", "Hello there"]}).json["choices"]
        assert both[3:] == [choice | {"index": 3 + i} for i, choice in enumerate(choices)]
    form = {"response_format": {"type": "json_object"}}
    for name, wrong in (
        *(("temperature", 0.5), ("top_p", 0.9), ("stop", "a"), ("stream", True), ("min_tokens", 1), ("best_of", 4)),
        *(("logprobs", True if path == CHAT else 0), ("length_penalty", 11), ("n", 1000), ("prompt_logprobs", 0)),
    ):
        assert post(app, path, body | {name: wrong}).error["param"] == name
    assert post(app, path, body | form).error["param"] == "use_beam_search"
    assert post(app, path, prompt | {"length_penalty": 0.5}).error["param"] == "length_penalty"
    assert post(app, path, body | {"n": 100}).status == 400  # more than max_num_seqs


def test_long_prompts_are_cut_if_the_client_says_so(app, llm):
    tokenizer = llm.engine.tokenizer
    long, shown = "the cat " * 100, {"return_token_ids": True, "truncate_prompt_tokens": 7}
    ids = tokenizer.encode(long)
    for prompt in (long, ids):
        choice = post(app, TEXT, {"prompt": prompt, "echo": True} | GREEDY | shown).json["choices"][0]
        assert choice["prompt_token_ids"] == ids[-7:] and choice["text"].startswith(tokenizer.decode(ids[-7:]))
    chat = {"messages": [{"role": "user", "content": long}]}
    whole = post(app, "/tokenize", chat).json["tokens"]
    assert post(app, CHAT, chat | GREEDY | shown).json["prompt_token_ids"] == whole[-7:]
    most = shown | {"truncate_prompt_tokens": -1}  # as many as leave room for max_tokens
    for reply in (post(app, CHAT, chat | GREEDY | most).json, post(app, TEXT, {"prompt": long} | GREEDY | most).json):
        assert reply["usage"]["prompt_tokens"] == 120 and reply["usage"]["completion_tokens"] == 8
    short = {"prompt": "Hello", "max_tokens": 1, "truncate_prompt_tokens": 128, "echo": True}
    assert post(app, TEXT, short).json["choices"][0]["text"].startswith("Hello")
    for path, body in ((CHAT, chat), (TEXT, {"prompt": long})):
        for wrong in (0, -2, 129):
            assert post(app, path, body | {"truncate_prompt_tokens": wrong}).error["param"] == "truncate_prompt_tokens"
    assert post(app, TEXT, {"prompt": long, "suffix": "x", "truncate_prompt_tokens": 7}).error["param"] == "suffix"
    side = post(app, TEXT, {"prompt": long, "truncation_side": "right", "truncate_prompt_tokens": 7})
    assert side.error["param"] == "truncation_side"


def test_seeds_stops_biases_and_penalties_reach_the_engine(app, offline):
    options = {"seed": 4, "max_tokens": 30, "min_tokens": 2, "temperature": 0.9, "top_p": 0.95, "top_k": 40}
    options |= {"min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1}
    options |= {"dry_multiplier": 2.5, "dry_base": 1.5, "dry_allowed_length": 1, "dry_sequence_breakers": ["e", " "]}
    options |= {"stop": ["q", "w"], "stop_token_ids": [70], "bad_words": ["the"], "include_stop_str_in_output": True}
    options |= {"skip_special_tokens": False, "ignore_eos": True, "allowed_token_ids": [*range(40, 200)]}
    bias = {80: 5, 81: -3.5}
    expected = offline.generate("the cat", SamplingParams(logit_bias=bias, **options), use_tqdm=False)[0].outputs[0]
    choice = post(app, TEXT, {"prompt": "the cat", "logit_bias": {"80": 5, "81": -3.5}, **options}).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    assert choice["stop_reason"] == expected.stop_reason


def test_best_of_returns_the_likeliest(app, offline):
    body = {"prompt": "the cat", "n": 2, "best_of": 4, "seed": 1, "max_tokens": 6}
    params = SamplingParams(n=2, best_of=4, seed=1, max_tokens=6)
    expected = [c.text for c in offline.generate("the cat", params, use_tqdm=False)[0].outputs]
    assert [choice["text"] for choice in post(app, TEXT, body).json["choices"]] == expected
    texts = ["", ""]
    for chunk in post(app, TEXT, body | {"stream": True}).events:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected


def test_salts_keep_prefixes_apart(app):
    def cached(salt):
        body = {"prompt": "the cat and the dog in the house " * 3, "cache_salt": salt, **GREEDY}
        return post(app, TEXT, body).json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0 and cached("one") > 0 and cached("two") == 0


# Responses


def test_a_response_is_that_of_a_chat(app):
    fields = {"temperature": 0, "max_output_tokens": 8}
    chat = post(app, CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 8}).json
    for given in ("Hello there", HELLO, [{"role": "user", "content": [{"type": "input_text", "text": "Hello there"}]}]):
        reply = post(app, "/v1/responses", {"input": given, **fields}).json
        assert reply["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert reply["usage"]["output_tokens"] == 8 and reply["object"] == "response"
    system = [{"role": "system", "content": "Be brief"}, *HELLO]
    chat = post(app, CHAT, {"messages": system, "temperature": 0, "max_tokens": 8}).json
    reply = post(app, "/v1/responses", {"input": HELLO, "instructions": "Be brief", **fields}).json
    assert reply["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_the_events_of_a_response_add_up_to_it(app):
    body = {"input": "Hello", "temperature": 0, "max_output_tokens": 12}
    whole = post(app, "/v1/responses", body).json
    stream = post(app, "/v1/responses", body | {"stream": True})
    lines = [line for line in stream.body.decode().splitlines() if line]
    names = [line.removeprefix("event: ") for line in lines[:-1:2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1:-1:2]]
    assert lines[-1] == "data: [DONE]" and names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert all(deltas) and "".join(deltas) == whole["output"][0]["content"][0]["text"]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert names[:4] + names[-4:] == [f"response.{name}" for name in begin + end]
    last = events[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": 5}], "instructions": "a"}, "input[0].content"),
        ({"input": "\ud800"}, "input"),
        ({"input": "a", "instructions": "\ud800"}, "instructions"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "reasoning"}, {"role": "user"}], "instructions": "a"}, "input[1].content"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": 5, "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}}}, "text.format"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"safety_identifier": 5}, "safety_identifier"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": 5}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"include": [5]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_a_bad_field_of_a_response_is_named(app, fields, param):
    reply = post(app, "/v1/responses", {"input": "Hello"} | fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    for name in ("messages", ".function", " max_tokens", "response_format"):  # a chat's
        assert name not in f" {reply.error['message']}"


# Models, tokens, templates


def test_models_and_aliases(app):
    data = get(app, "/v1/models").json["data"]
    assert [model["id"] for model in data] == ["tiny", "alias"]
    assert data[1]["root"] == "tiny" and data[0]["max_model_len"] == 128 and data[0]["object"] == "model"
    assert get(app, "/v1/models/alias").json["id"] == "alias"
    assert get(app, "/v1/models/").json["data"] == data
    assert post(app, TEXT, {"model": "alias", "prompt": "a"}).json["model"] == "alias"
    for reply in (get(app, "/v1/models/gpt-4"), post(app, TEXT, {"model": "gpt-4", "prompt": "a"})):
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


def test_the_defaults_of_generation_config_are_shown(app, llm, monkeypatch):
    assert get(app, "/v1/models/tiny").json["default_sampling_params"] == {}
    defaults = SamplingParams(temperature=0.6, repetition_penalty=1.1)
    monkeypatch.setattr(llm.engine, "default_sampling_params", defaults)
    shown = get(app, "/v1/models").json["data"][1]["default_sampling_params"]
    assert shown == {"temperature": 0.6, "repetition_penalty": 1.1}


def test_tokens_go_both_ways(app, offline):
    ids = offline.engine.tokenizer.encode("the café")
    reply = post(app, "/tokenize", {"prompt": "the café", "return_token_strs": True}).json
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == (ids, len(ids), 128)
    assert len(reply["token_strs"]) == len(ids)
    assert post(app, "/detokenize", {"tokens": ids}).json == {"prompt": "the café"}
    rendered = offline.engine.tokenizer.apply_chat_template(HELLO, tokenize=True)
    assert post(app, "/tokenize", {"messages": HELLO}).json["tokens"] == rendered
    info = get(app, "/tokenizer_info").json
    assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"]
    assert post(app, "/tokenize", {"prompt": "a", "messages": HELLO}).error["param"] == "prompt"
    assert post(app, "/detokenize", {"tokens": [10**30]}).error["param"] == "tokens[0]"


def test_messages_as_clients_send_them(app):
    def text_of(messages, **fields):
        ids = post(app, "/tokenize", {"messages": messages, **fields}).json["tokens"]
        return post(app, "/detokenize", {"tokens": ids}).json["prompt"]

    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    assert "Hello\nthere" in text_of([{"role": "user", "content": parts}])
    assert text_of([{"role": "developer", "content": "Be brief"}, *HELLO]).startswith("<|im_start|>system\nBe brief")
    sent_back = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": None}
    assert "assistant\nHi<|im_end|>" in text_of([*HELLO, sent_back, *HELLO])
    going_on = text_of([*HELLO, {"role": "assistant", "content": "I am"}], continue_final_message=True)
    assert going_on.endswith("assistant\nI am")
    assert text_of(HELLO).endswith("assistant\n")
    assert text_of(HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")
    for refused in ({"refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}):
        assert "assistant\nNo.<|im_end|>" in text_of([*HELLO, {"role": "assistant", "content": None} | refused, *HELLO])
    assert "assistant\n<|im_end|>" in text_of([*HELLO, {"role": "assistant", "content": None}, *HELLO])


# Errors

CALLING = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
BAD_VALUES = {  # field -> values, each of which is an error that names the field
    "n": [0, 129, 10**40, "2"],
    "best_of": [10**9],
    "temperature": [-1, "hot", float("nan"), float("inf")],
    "top_p": [0, 2],
    "top_k": [-5, 1.5],
    "min_p": [2],
    "repetition_penalty": [0],
    "presence_penalty": [3],
    "frequency_penalty": ["a"],
    "dry_multiplier": [-1],
    "dry_base": [0.5],
    "dry_allowed_length": [0],
    "dry_sequence_breakers": ["a", ["a"] * 17],
    "dry_penalty_last_n": [64],
    "max_tokens": [0, -1, 1.5, True],
    "seed": [2**70, "a"],
    "stop": [5, [""], [5], ["a"] * 5000, "a" * 20_000, "\udc00"],
    "stop_token_ids": [[10**6], 5],
    "bad_words": [[""], ["a"] * 5000, ["a" * 20_000]],
    "allowed_token_ids": [[], [-1], [1] * 300_000],
    "logit_bias": [{"a": 1}, {"-1": 1}, {"1000000": 1}, [1], {str(i): 1 for i in range(5000)}],
    "logprobs": [3],
    "top_logprobs": [3],
    "stream": ["yes"],
    "priority": [1, "a"],
    "cache_salt": [5, "", "\ud800", "a" * 2000],
    "ignore_eos": [1],
    "model": [5],
    "messages": [[], None, "hello"],
    "chat_template": ["{{ 1 }}"],
    "guided_anything": ["a"],
    "json_schema": [{}],
}
BAD_CHATS = [
    *(({name: value}, name) for name, values in BAD_VALUES.items() for value in values),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "logprobs"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, "messages[0].images"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "b"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages[0].prefix"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", **CALLING}], "continue_final_message": True}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": 1}}]}, "messages[0].audio"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"bad_words": ["\ud800"]}, "bad_words[0]"),
    ({"stop_token_ids": [True] * 300_000}, "stop_token_ids[0]"),
    ({"messages": [1] * 300_000}, "messages[0]"),
    ({f"field {i}": 1 for i in range(300)}, None),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=[f"{i}" for i in range(len(BAD_CHATS))])
def test_a_bad_field_of_a_chat_is_named(app, fields, param):
    for stream in (False, True):
        reply = post(app, CHAT, {"messages": HELLO, "stream": stream} | fields)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), reply.body
        assert reply.error["param"] == param
        assert reply.headers["x-should-retry"] == "false"
        assert len(reply.body) < 2000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(
            ({"prompt": prompt}, "prompt")
            for prompt in ([], "", None, 5, {"a": 1}, ["a", 5], [[1, "a"]], [[]], [10**6], [-1])
        ),
        ({"prompt": [10**40]}, "prompt[0]"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 100}, "n"),
        ({"prompt": "\udfff"}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "echo": True, "suffix": "b"}, "suffix"),
        ({"prompt": [True] * 300_000}, "prompt"),
        ({"prompt": ["a", *[5] * 300_000]}, "prompt"),
        ({"prompt": "a", "logit_bias": {"k" * 1_000_000: 1}}, "logit_bias"),
    ],
)
def test_a_bad_field_of_a_completion_is_named(app, fields, param):
    reply = post(app, TEXT, fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert "prompt_token_ids" not in reply.error["message"]  # the name is the engine's


def test_a_reply_with_too_many_logprobs_is_refused(app, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_LOGPROBS", 100)
    body = {"messages": HELLO, "n": 2, "max_tokens": 20, "logprobs": True}
    assert post(app, CHAT, body | {"top_logprobs": 1}).status == 200
    assert post(app, CHAT, body | {"top_logprobs": 2}).error["param"] == "logprobs"
    assert post(app, TEXT, {"prompt": "a" * 60, "logprobs": 2, "max_tokens": 1}).status == 200
    assert post(app, TEXT, {"prompt": "a" * 60, "logprobs": 2, "max_tokens": 1, "echo": True}).status == 400


def test_a_prompt_that_is_too_long_says_what_clients_look_for(app):
    for path, body in (
        (TEXT, {"prompt": "the cat " * 100}),
        (TEXT, {"prompt": "a" * 1_000_000}),
        (TEXT, {"prompt": [5] * 128}),
        (CHAT, {"messages": [{"role": "user", "content": "the cat " * 100}]}),
    ):
        reply = post(app, path, body | {"stream": True})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "This model's maximum context length is 128 tokens" in reply.error["message"]


@pytest.mark.parametrize("name", [*REFUSED])
def test_a_field_that_is_refused_is_named_and_its_neutral_values_pass(app, name):
    neutral, why = REFUSED[name]
    path, body = (TEXT, {"prompt": "a"}) if name in ChatBody.model_fields else (CHAT, {"messages": HELLO})
    reply = post(app, path, body | {name: {"some": "thing"}})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported")
    assert why in reply.error["message"]
    for value in neutral:
        assert post(app, path, body | {"max_tokens": 1, name: value}).status == 200


def test_tools_have_the_template_that_is_made_for_them(llm, app, monkeypatch):
    tokenizer = llm.engine.tokenizer
    monkeypatch.setattr(tokenizer, "tool_template", "[TOOL_CALLS]{{ tools[0].function.name }}")
    body = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "now"}}]}
    none = {"tool_choice": "none"}
    assert tokenizer.decode(post(app, "/tokenize", body).json["tokens"]) == "[TOOL_CALLS]now"
    assert read_tool_use(llm, ChatBody(**body), ToolOptions()).format is MISTRAL
    assert read_tool_use(llm, ChatBody(**body, **none), ToolOptions()).format is None
    chats = [post(app, CHAT, more | {"messages": HELLO, **GREEDY}).json for more in ({}, body, none | body)]
    lengths = [chat["usage"]["prompt_tokens"] for chat in chats]
    assert lengths[0] == lengths[2] != lengths[1]


def test_what_a_model_thinks_is_not_content(llm, app, monkeypatch):
    plain = post(app, CHAT, {"messages": HELLO, **GREEDY}).json["choices"][0]["message"]
    assert "reasoning" not in plain and plain["content"]
    error = post(app, CHAT, {"messages": HELLO, "thinking_token_budget": 3}).json["error"]
    assert error["param"] == "thinking_token_budget"
    tokenizer = llm.engine.tokenizer
    template = tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    whole = post(app, CHAT, {"messages": HELLO, **GREEDY}).json  # a random model, which goes on thinking
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != "" and message["content"] == ""
    events = post(app, CHAT, {"messages": HELLO, "stream": True, **GREEDY}).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    response = post(app, "/v1/responses", {"input": "Hello there", "temperature": 0, "max_output_tokens": 8}).json
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    budget = {"thinking_token_budget": 3, "max_tokens": 20}
    limited = of_chat(post(app, CHAT, {"messages": HELLO, **GREEDY, **budget}).json)
    assert message["reasoning"].startswith(limited[0]) and limited[1]
    assert 0 < len(limited[0]) < len(message["reasoning"])
    assert of_stream(post(app, CHAT, {"messages": HELLO, "stream": True, **GREEDY, **budget}).events) == limited
    response = post(app, "/v1/responses", {"input": "Hello there", "temperature": 0, "thinking_token_budget": 3}).json
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


def of_chat(reply):
    choice = reply["choices"][0]
    return choice["message"].get("reasoning", ""), choice["message"]["content"], choice["stop_reason"]


def of_stream(events):
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    texts = ["".join(delta.get(name, "") for delta in deltas) for name in ("reasoning", "content")]
    return *texts, events[-1]["choices"][0]["stop_reason"]


@pytest.mark.parametrize(
    ("begins", "text", "options", "expected"),
    [
        ("<think>\n", "Okay, cats</think>Hello", {}, ("Okay, cats", "Hello", None)),
        ("<think>\n", "Okay, cats</think>Hello cats!", {}, ("Okay, cats", "Hello ", "cats")),
        ("<think>\n", "Okay, cats</think>Hi", {"stop_in_reasoning": True}, ("Okay, ", "", "cats")),
        ("<think>\n", "a\n\nb</think>\n\nHi\n\nyou", {"stop": "\n\n"}, ("a\n\nb", "Hi", "\n\n")),
        ("<think>\n", "a</think>Hello", {"stop": ["</think>", "</think>Hell", ">H"]}, ("a", "Hello", None)),
        ("<think>\n", "a</think>cacats", {}, ("a", "ca", "cats")),
        ("<think>\n", "Okay, cats", {}, ("Okay, cats", "", None)),  # it never ends
        ("<think>\n", "</think>Hi cats", {}, ("", "Hi ", "cats")),
        ("<think>\nWell, so", " cats</think>Hi cats", {}, (" cats", "Hi ", "cats")),
        ("<think>a</think>", "Hi cats", {}, ("", "Hi ", "cats")),
        ("{# <think> #}", "<think>cats</think>Hi cats", {}, ("cats", "Hi ", "cats")),
        ("{# </think> #}", " <think>cats</think> cats", {"include_stop_str_in_output": True}, ("cats", "cats", "cats")),
        ("{# </think> #}", "So, cats and <think>", {}, ("", "So, ", "cats")),
        ("{# </think> #}", "<thing", {"stop": "<t"}, ("", "", "<t")),
        ("", "<think>cats</think>", {}, ("", "<think>", "cats")),  # the template knows no reasoning
        ("<think>\n", "Oh! cats</think>", {"stop_token_ids": [3]}, ("Oh", "", 3)),  # a token stops anywhere
    ],
)
def test_stop_strings_are_searched_in_the_answer(llm, app, say, monkeypatch, begins, text, options, expected):
    tokenizer = llm.engine.tokenizer
    template = tokenizer.chat_template
    template = template + begins if "{#" in begins else template.replace("assistant\n", "assistant\n" + begins)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    body = {"messages": HELLO, "stop": ["cats"], "temperature": 0, "n": 2} | options
    say(text)
    assert of_chat(post(app, CHAT, body).json) == expected
    say(text)
    assert of_stream(post(app, CHAT, body | {"stream": True, "n": 1}).events) == expected
    say(text)
    body = {"input": "Hello there"} | {name: value for name, value in body.items() if name not in ("messages", "n")}
    items = {item["type"]: item["content"][0]["text"] for item in post(app, "/v1/responses", body).json["output"]}
    assert (items.get("reasoning", ""), items.get("message", "")) == expected[:2]


@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        ("<think>Let me", " see cats</think>Yes, cats", (" see cats", "Yes, ", "cats")),
        ("<think>a</think>Yes,", " two cats", ("", " two ", "cats")),
        ("Before.\n<think>\nLet me", " see</think>No", (" see", "No", None)),
    ],
)
def test_reasoning_that_a_message_begins_goes_on(app, say, content, text, expected):
    begun = {"role": "assistant", "content": content}
    body = {"messages": [*HELLO, begun], "continue_final_message": True, "stop": "cats", "temperature": 0}
    say(text)
    assert of_chat(post(app, CHAT, body).json) == expected
    say(text)
    assert of_stream(post(app, CHAT, body | {"stream": True}).events) == expected


def test_a_grammar_begins_behind_reasoning_that_a_message_begins(app):
    messages = [*HELLO, {"role": "assistant", "content": "<think>Let me"}]
    form = {"structured_outputs": {"choice": ["yes"]}, "continue_final_message": True} | GREEDY | {"ignore_eos": False}
    reasoning, content, _ = of_chat(post(app, CHAT, {"messages": messages} | form).json)
    assert reasoning not in ("", "yes") and content == ""
    messages[-1]["content"] = "<think>Let me</think>"
    assert of_chat(post(app, CHAT, {"messages": messages} | form).json)[:2] == ("", "yes")


def test_what_others_say_begins_no_reasoning(llm, app, say, monkeypatch):
    tokenizer = llm.engine.tokenizer
    talk = [{"role": "system", "content": "Use <think>."}, {"role": "user", "content": "What does <think> mean?"}]
    for template in (tokenizer.chat_template, "{% for m in messages %}{{ m.content }}\n{% endfor %}A:{# </think> #}"):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        say("A mark</think>")
        assert of_chat(post(app, CHAT, {"messages": talk, "temperature": 0}).json) == ("", "A mark</think>", None)


def test_usage_of_every_chunk_reads_a_reply_once(llm, app, monkeypatch):
    tokenizer, read = llm.engine.tokenizer, []
    template = tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    feed = ReplyReader.feed
    monkeypatch.setattr(ReplyReader, "feed", lambda self, text: read.append(len(text)) or feed(self, text))
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}} | GREEDY
    *events, _ = post(app, CHAT, {"messages": HELLO, "n": 2, **options, "max_tokens": 60}).events
    usages = [event["usage"] for event in events]
    assert len(usages) > 50 and usages[-1]["completion_tokens"] == 120
    for usage in usages:
        assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]
    deltas = [event["choices"][0]["delta"] for event in events]
    length = sum(len(delta.get("reasoning", "")) for delta in deltas)
    assert length > 50 and sum(read) < 1.5 * length


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "text", ["<think>a</think>b", " <think></think>b", "a<think>b</think>", " \n ", "<think></", "<thi"]
)
def test_reasoning_is_counted_as_it_comes_as_in_the_whole_reply(llm, text, begun):
    for end in (None, "</think>"):
        tokens = ["</think>" if at == text.find("</think>") + 7 else char for at, char in enumerate(text)]
        growing, whole = (Chat(ServerState(["tiny"], llm=llm), ChatBody(messages=HELLO)) for _ in range(2))
        growing.reasoning = whole.reasoning = begun
        for length in range(len(text) + 1):
            ended, new = "stop" if length == len(text) else None, text[:length][-1:]
            part = CompletionOutput(0, text[:length], tokens[:length], finish_reason=ended, delta=new)
            growing.pieces(Change(0, None, part, 0))
            count = growing.count_thought(part, end)
        reply, _ = whole.read(part)
        expected = tokens.index(end) + 1 if end in tokens else len(tokens) if reply.reasoning else 0
        assert count == whole.count_thought(part, end) == expected


@pytest.mark.parametrize(
    "field",
    [
        {"stop": ["e"]},
        {"logit_bias": {"10": 100}},
        {"allowed_token_ids": [10, 11]},
        {"min_tokens": 12, "stop_token_ids": [*range(5, 200)]},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 2.0},
        {"bad_words": ["e"]},
        {"ignore_eos": True},
        {"top_k": 1, "temperature": 1.0},
        {"seed": 5, "temperature": 1.0},
        {"seed": 5, "temperature": 1.0, "min_p": 0.9},
    ],
)
def test_a_response_is_sampled_as_a_chat_is(app, field):
    common = {"temperature": 0} | field
    chat = post(app, CHAT, {"messages": HELLO, "max_tokens": 20} | common).json
    response = post(app, "/v1/responses", {"input": "Hello there", "max_output_tokens": 20} | common)
    assert "x-ignored-fields" not in response.headers
    assert response.json["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert response.json["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]


@pytest.mark.parametrize("name", [*ResponsesBody.refused])
def test_a_response_refuses_what_does_not_fit_it(app, name):
    neutral, why = ResponsesBody.refused[name]
    body = {"input": "Hello there", "max_output_tokens": 1}
    reply = post(app, "/v1/responses", body | {name: 3})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported")
    assert why in reply.error["message"]
    for value in neutral:
        assert post(app, "/v1/responses", body | {name: value}).status == 200


def test_no_field_of_a_chat_is_ignored_in_a_response():
    known = {*ResponsesBody.model_fields, *ResponsesBody.refused, *REFUSED, "stream_options"}  # the last is no sampling
    assert ChatBody.model_fields.keys() | CompletionBody.model_fields.keys() <= known
    assert CompletionBody.model_fields.keys() <= {*ChatBody.model_fields, *ChatBody.refused, *REFUSED}


def test_unknown_fields_are_listed_or_refused(state, app):
    body = {"messages": HELLO, "max_tokens": 1, "user": "me", "metadata": {}, "foo": 1, "bar\r\nx": 2}
    for stream in (False, True):
        assert post(app, CHAT, body | {"stream": stream}).headers["x-ignored-fields"] == "foo, barx"
    assert "x-ignored-fields" not in post(app, CHAT, {"messages": HELLO, "max_tokens": 1, "user": "me"}).headers
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    nested = {"messages": HELLO, "max_tokens": 1} | options
    assert post(app, CHAT, nested).headers["x-ignored-fields"] == "stream_options.include_obfuscation"
    text = {"input": "a", "max_output_tokens": 1, "text": {"style": 1}}
    assert post(app, "/v1/responses", text).headers["x-ignored-fields"] == "text.style"
    for text_field in ({"reasoning": {"effort": "low"}}, {"text": {"verbosity": "medium"}}):
        reply = post(app, "/v1/responses", {"input": "a", "max_output_tokens": 1} | text_field)
        assert reply.headers.get("x-ignored-fields") == ("reasoning.effort" if "reasoning" in text_field else None)
    included = {"input": "a", "max_output_tokens": 1, "include": ["reasoning.encrypted_content", "a.b"]}
    reply = post(app, "/v1/responses", included)
    assert reply.headers["x-ignored-fields"] == "include: reasoning.encrypted_content, include: a.b"
    assert "x-ignored-fields" not in post(app, "/v1/responses", included | {"include": []}).headers
    strict = create_app(dataclasses.replace(state, strict_fields=True))
    assert post(strict, "/v1/responses", included).error["param"] == "include: reasoning.encrypted_content"
    reply = post(strict, CHAT, body)
    assert (reply.status, reply.error["param"]) == (400, "foo")
    reply = post(strict, CHAT, nested)
    assert (reply.status, reply.error["param"]) == (400, "stream_options.include_obfuscation")
    assert post(strict, CHAT, {"messages": HELLO, "max_tokens": 1, "user": "me"}).status == 200


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses"])
def test_integers_may_be_written_as_floats(app, path):
    prompt = {CHAT: {"messages": HELLO}, TEXT: {"prompt": [5.0, 6]}, "/v1/responses": {"input": "a"}}[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields = {limit: 4.0, "seed": 5.0, "top_k": 3.0, "min_tokens": 2.0, "stop_token_ids": [7.0, 8], "priority": -0.0}
    usage = post(app, path, prompt | fields).json["usage"]
    assert 2 <= usage.get("completion_tokens", usage.get("output_tokens")) <= 4
    assert post(app, path, prompt | {limit: 4.5}).error["param"] == limit


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"a"', b"5", b"\xff\xfe", b'{"messages": "\xff"}', b"[" * 100_000, b"{}"],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_object_is_an_error(app, body):
    reply = post(app, CHAT, body)
    assert reply.status == 400 and reply.error["message"]


def test_too_many_fields_are_an_error_that_says_so(app):
    many = {f"field{i}": 1 for i in range(300)}
    for body in ({"messages": HELLO} | many, {"messages": HELLO, "stream": True, "stream_options": many}):
        reply = post(app, CHAT, body)
        assert reply.status == 400 and "more than 256 fields" in reply.error["message"]


def test_deep_json_is_an_error(app):
    deep = json.loads("[" * 200 + "]" * 200)
    for fields in ({"messages": deep}, {"messages": [{"role": "user", "content": deep}]}, {"stop": deep}):
        assert post(app, CHAT, {"messages": HELLO} | fields).status == 400


def test_another_content_type_is_an_error(app):
    reply = post(app, CHAT, json.dumps({"messages": HELLO}).encode(), headers={"content-type": "text/plain"})
    assert reply.status == 400 and "application/json" in reply.error["message"]


@pytest.mark.parametrize("path", NOT_SERVED)
def test_what_is_not_served_is_a_404_that_says_why(app, path):
    reply = post(app, path, {"model": "tiny"})
    assert reply.status == 404 and f"{path} is not served" in reply.error["message"]


def test_unknown_paths_and_methods(app):
    assert get(app, "/v1/nothing").status == 404 and get(app, "/v1/nothing").error["code"] == "not_found"
    assert get(app, CHAT).status == 405
    assert asyncio.run(call(app, "DELETE", "/v1/models")).status == 405


# Keys, hosts, bodies


def test_everything_but_health_and_the_page_needs_the_key(state):
    app = create_app(state, api_keys=["secret", "other"], hosts=["localhost"])
    for path in ("/health", "/ping", "/"):
        assert get(app, path).status == 200
    for path in ("/metrics", "/v1/models", "/version", "/load", "/openapi.json", "/nothing", "//health", "/health/"):
        assert get(app, path).status == 401, path
    for path in ("/v1/models/../health", "/health%00", "/HEALTH"):
        assert get(app, path).status == 401, path
    body = {"messages": HELLO, "max_tokens": 1}
    basic, unknown = {"authorization": "Basic secret"}, {"x-api-key": "no"}
    for wrong in ({}, {"authorization": "Bearer no"}, {"authorization": "secret"}, basic, unknown):
        reply = post(app, CHAT, body, headers=wrong)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    for key in ("secret", "other"):
        assert post(app, CHAT, body, headers={"authorization": f"Bearer {key}"}).status == 200
        assert post(app, CHAT, body, headers={"authorization": "Bearer no", "x-api-key": key}).status == 200
    # A proxy may add a prefix; the host of a URL does not count.
    assert get(app, "/v1/models", headers={"host": "x/health?"}).status == 401
    app = create_app(state, api_keys=["secret"], hosts=["localhost"], root_path="/api")
    key = {"authorization": "Bearer secret"}
    for path in ("/v1/models", "/api/v1/models", "/api/v1/models/", "/api/v1/models/tiny", "/api/metrics"):
        assert get(app, path).status == 401 and get(app, path, headers=key).status == 200, path
    for path in ("/health", "/api/health", "/api", "/api/"):
        assert get(app, path).status == 200, path
    for path in ("/api/api/health", "/apihealth", "/api/healthy", "/other/health", "/api//health"):
        assert (get(app, path).status, get(app, path, headers=key).status) == (401, 404), path


def test_metrics_need_no_key_if_they_are_public(state):
    app = create_app(state, api_keys=["secret"], public_metrics=True)
    assert get(app, "/metrics").status == get(app, "/health").status == 200
    assert get(app, "/version").status == get(app, "/metrics/").status == 401


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/responses", "/v1/messages"])
def test_each_key_can_have_its_own_prefixes(state, path):
    text = "the cat and the dog in the house " * 3
    state.salt_per_key = True
    app = create_app(state, api_keys=["one", "two"])

    def cached(key, salt=None):
        messages = {"messages": [{"role": "user", "content": text}]}
        prompt = {TEXT: {"prompt": text}, "/v1/responses": {"input": text}}
        body = prompt.get(path, messages) | {"temperature": 0, "cache_salt": salt}
        body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 1
        usage = post(app, path, body, headers={"authorization": f"Bearer {key}"}).json["usage"]
        if path == "/v1/messages":
            return usage["cache_read_input_tokens"]
        return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]

    state.llm.engine.reset_prefix_cache()
    assert cached("one") == cached("two") == cached("one", "salt") == 0
    assert min(cached("one"), cached("two"), cached("one", "salt")) > 0 and cached("two", "salt") == 0


def test_a_page_elsewhere_cannot_reach_a_local_server(app):
    for host in ("evil.example", "localhost.evil.example", "", "localhost:80:90"):
        reply = get(app, "/v1/models", headers={"host": host})
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    for host in ("localhost", "localhost:8000", "LOCALHOST"):
        assert get(app, "/v1/models", headers={"host": host}).status == 200
    assert "access-control-allow-origin" not in get(app, "/v1/models", headers={"origin": "http://evil"}).headers


def test_pages_of_allowed_origins_may_call_the_server(state):
    ours, foreign = "http://localhost:3000", "http://evil.example"
    app = share_with([ours], create_app(state, ["secret"]))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allows = "access-control-allow-origin"
    reply = asyncio.run(call(app, "OPTIONS", CHAT, headers={"origin": ours} | asked))  # without a key
    assert (reply.status, reply.headers[allows]) == (200, ours)
    assert reply.headers["access-control-allow-headers"] == "authorization"
    for origin, key, status in ((ours, "secret", 200), (ours, "wrong", 401), (foreign, "secret", 200)):
        headers = {"origin": origin, "authorization": f"Bearer {key}"}
        reply = asyncio.run(call(app, "POST", CHAT, {"messages": HELLO, "max_tokens": 2}, headers))
        assert reply.status == status and reply.headers.get(allows) == (ours if origin == ours else None)
        assert "x-ignored-fields" in reply.headers["access-control-expose-headers"]
    reply = asyncio.run(call(app, "OPTIONS", CHAT, headers={"origin": foreign} | asked))
    assert reply.status == 400 and allows not in reply.headers
    everyone = share_with(["*"], create_app(state, ["secret"]))
    reply = asyncio.run(call(everyone, "GET", "/health", headers={"origin": foreign}))
    assert reply.headers[allows] == "*" and "access-control-allow-credentials" not in reply.headers


def test_a_request_id_is_echoed_if_it_is_harmless(app):
    assert get(app, "/version", headers={"x-request-id": "a-1.2"}).headers["x-request-id"] == "a-1.2"
    for bad in ("a b", "x" * 200, "ü", "<script>"):
        assert "x-request-id" not in get(app, "/version", headers={"x-request-id": bad}).headers


def test_a_body_that_is_too_large_or_too_slow_is_refused(app, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_BODY", 1000)
    assert post(app, TEXT, {"prompt": "a" * 2000}).status == 413
    assert post(app, TEXT, b"", headers={"content-length": "2000"}).status == 413
    assert post(app, TEXT, b"", headers={"content-length": "-5"}).status == 413
    assert post(app, TEXT, None, chunks=[b"a" * 300] * 5).status == 413
    assert post(app, TEXT, None, chunks=[b'{"prompt": ', b'"a"}']).status == 200
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.05)
    assert post(app, TEXT, None, chunks=[b'{"prompt": ', None]).status == 408


# Going away


def group_of(llm, predicate):
    scheduler = llm.engine.scheduler
    return any(predicate(group) for group in scheduler.running + scheduler.waiting)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["at once", "prefilling", "decoding", "late"])
def test_a_client_that_goes_away_aborts_its_request_and_no_other(llm, state, app, monkeypatch, stream, moment):
    long = {"ignore_eos": True, "temperature": 0, "max_tokens": 100}
    before = dict(llm.metrics.ended)

    reached, gone = threading.Event(), threading.Event()

    def is_moment(group):
        seq = group.seqs[0]
        if moment == "prefilling":
            return 0 < seq.num_computed_tokens < seq.num_prompt_tokens > 80
        return seq.num_prompt_tokens > 80 and seq.num_output_tokens >= (1 if moment == "decoding" else 15)

    def wait_at_the_moment(stats):
        if moment != "at once" and not reached.is_set() and group_of(llm, is_moment):
            reached.set()
            gone.wait(60)  # the engine goes on when the client has gone

    async def crowd():
        other = asyncio.create_task(call(app, "POST", TEXT, {"prompt": "the cat", **long}))
        body = {"prompt": [7 + i % 90 for i in range(90)], "stream": stream, "n": 2, "seed": 1, **long}
        reply = await call(
            app,
            "POST",
            TEXT,
            body | {"temperature": 1},
            leave_when=lambda reply: moment == "at once" or reached.is_set(),
        )
        gone.set()
        assert not reply.body.endswith(b"[DONE]\n\n")
        return await other

    monkeypatch.setattr(llm.engine, "listeners", [*llm.engine.listeners, wait_at_the_moment])
    assert len(asyncio.run(crowd()).json["choices"][0]["text"]) > 0
    asyncio.run(at_rest(llm))
    after = llm.metrics.ended
    assert after["length"] == before["length"] + 1
    assert state.num_disconnects == 1
    assert after["abort"] - before["abort"] in ((0, 2) if moment == "at once" else (2,))


def test_silence_is_filled_with_comments(app, llm, monkeypatch):
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.01)
    step = llm.engine.step

    def slow():
        import time

        time.sleep(0.03)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow)
    reply = post(app, TEXT, {"prompt": "a", "stream": True, **GREEDY})
    assert b": keep-alive\n\n" in reply.body and reply.events[-1]["choices"][0]["finish_reason"] == "length"
    reply = post(app, "/v1/messages", {"messages": HELLO, "stream": True, **GREEDY})  # by events in place of comments
    assert reply.body.startswith(streaming.PING) and reply.body.endswith(b'"message_stop"}\n\n')


# The engine's state


def test_while_the_model_loads_everything_is_503(model):
    app = create_app(ServerState(["tiny"]))
    for reply in (get(app, "/health"), post(app, CHAT, {"messages": HELLO}), post(app, "/tokenize", {"prompt": "a"})):
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "loading", "5")
    assert get(app, "/v1/models").status == get(app, "/metrics").status == get(app, "/version").status == 200


def test_a_full_queue_is_429_with_a_time_to_wait(llm, state, app):
    state.max_queue = 2
    assert post(app, TEXT, {"prompt": ["a", "b"]}).status == 200
    assert post(app, TEXT, {"prompt": ["a", "b", "c"]}).status == 400  # it could never wait

    async def crowd(count, prompt):
        bodies = [{"prompt": prompt, "stream": i % 2 == 0, **GREEDY} for i in range(count)]
        return await asyncio.gather(*(call(app, "POST", TEXT, body) for body in bodies))

    replies = asyncio.run(crowd(8, "the cat"))
    assert [reply.status for reply in replies] == [200] * 2 + [429] * 6
    for reply in replies[2:]:
        assert reply.error["code"] == "queue_full" and "x-should-retry" not in reply.headers
        assert 1 <= int(reply.headers["retry-after"]) <= 120
    state.max_queue, state.max_queue_tokens = 100, 100
    replies = asyncio.run(crowd(8, [7] * 40))
    assert [reply.status for reply in replies] == [200] * 2 + [429] * 6
    state.max_queue_tokens = 10
    assert post(app, TEXT, {"prompt": [7] * 40}).status == 200  # alone


def test_a_draining_server_refuses(state, app):
    state.draining = True
    for reply in (get(app, "/health"), post(app, CHAT, {"messages": HELLO})):
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")


def test_a_hung_step_is_not_healthy(state, app, monkeypatch):
    assert get(app, "/health").status == 200
    monkeypatch.setattr(EngineThread, "seconds_without_progress", 1000)
    assert get(app, "/health").error["code"] == "stalled"


def test_a_request_whose_step_fails_is_500_and_no_other(llm, app, monkeypatch, caplog):
    launch, bad = llm.engine.executor.worker.launch, llm.engine.tokenizer.encode("bad")
    rows = set()

    def failing(batch):
        for new in batch.new:
            (rows.add if new.token_ids[: len(bad)] == bad else rows.discard)(new.row)
        if rows & set(batch.rows):
            raise ValueError("a bad row")
        return launch(batch)

    monkeypatch.setattr(llm.engine.executor.worker, "launch", failing)

    async def crowd():
        good = call(app, "POST", TEXT, {"prompt": "the cat", **GREEDY})
        replies = [call(app, "POST", TEXT, {"prompt": "bad", "stream": stream, **GREEDY}) for stream in (False, True)]
        return await asyncio.gather(good, *replies)

    good, whole, stream = asyncio.run(crowd())
    assert good.status == 200
    assert (whole.status, whole.error["code"]) == (500, "request_failed")
    assert "a bad row" not in whole.error["message"] and "a bad row" in caplog.text
    assert whole.headers["x-should-retry"] == "false"
    assert stream.status == 200 and stream.events[-1]["error"]["code"] == "request_failed"


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses"])
def test_a_stream_that_fails_says_so_and_ends(app, monkeypatch, caplog, path):
    """Whatever fails: here, what reads the outputs."""
    module = {CHAT: chat, TEXT: completions, "/v1/responses": responses}[path]
    plain = module.changes

    async def failing(*args):
        count = 0
        async for change in plain(*args):
            if (count := count + 1) == 3:
                raise RuntimeError("no such thing")
            yield change

    prompt = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}, "/v1/responses": {"input": "a"}}[path]
    body = prompt | {"stream": True, "ignore_eos": True, "temperature": 0}
    monkeypatch.setattr(module, "changes", failing)
    reply = post(app, path, body)
    *events, last = (event.partition("data: ")[2] for event in reply.body.decode().split("\n\n")[:-2])
    assert reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n") and len(events) > 1
    error = json.loads(last)
    if path == "/v1/responses":
        assert (error["type"], error["response"]["status"]) == ("response.failed", "failed")
        assert error["sequence_number"] == len(events)
        error = error["response"]
    assert "log says more" in error["error"]["message"]
    assert "no such thing" in caplog.text


def test_an_engine_that_dies_ends_every_request_with_an_error(model):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))
    state = ServerState(["tiny"], llm=llm)
    app = create_app(state)

    def broken():
        raise OSError("the device is gone")

    async def crowd():
        long = {"prompt": "the cat", "max_tokens": 100, "ignore_eos": True}
        calls = [asyncio.create_task(call(app, "POST", TEXT, long | {"stream": stream})) for stream in (False, True)]
        while len(llm.engine.scheduler.running) < 2:
            await asyncio.sleep(0.001)
        llm.engine.step = broken
        return await asyncio.gather(*calls)

    whole, stream = asyncio.run(crowd())
    assert (whole.status, whole.error["code"]) == (503, "engine_dead")
    assert stream.events[-1]["error"]["code"] == "engine_dead"
    assert get(app, "/health").status == 503 and post(app, TEXT, {"prompt": "a"}).status == 503
    assert state.num_active == 0
    llm.shutdown()


def test_metrics_count_accepted_drafts_at_each_position():
    from prometheus_client.parser import text_string_to_metric_families

    counted = Metrics(fake_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3}))
    for accepted in (0, 2, 3, 1):
        stats = StepStats()
        stats.count_draft(3, accepted)
        counted.count(stats)
    page = metrics_reply(ServerState(["tiny"]), counted.collect()).body.decode()
    families = {f.name.removeprefix("vllm:spec_decode_"): f for f in text_string_to_metric_families(page)}
    positions = families["num_accepted_tokens_per_pos"].samples
    assert {sample.labels["position"]: sample.value for sample in positions} == {"0": 3, "1": 2, "2": 1}
    totals = [families[name].samples[0].value for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
    assert totals == [4, 12, 6]


def test_metrics_have_the_names_that_dashboards_look_for(app):
    from prometheus_client.parser import text_string_to_metric_families

    post(app, CHAT, {"messages": HELLO, **GREEDY})
    get(app, "/no/such/path")
    families = {f.name: f for f in text_string_to_metric_families(get(app, "/metrics").body.decode())}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens"):
        assert f"vllm:{name}" in families
    histograms = {name.removeprefix("vllm:"): f for name, f in families.items() if f.type == "histogram"}
    assert histograms.keys() == {
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_time_per_output_token_seconds", "request_max_num_generation_tokens", "iteration_tokens_total"),
        *(f"request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode", "inference")),
        *(f"request_{kind}_tokens" for kind in ("prompt", "generation")),
        *("request_params_n", "request_params_max_tokens"),
    }
    for name, family in histograms.items():
        assert next(s for s in family.samples if s.name.endswith("_count")).value >= 1, name
    assert families["vllm:cache_config_info"].samples[0].labels["block_size"] == "8"
    requests = {(s.labels["handler"], s.labels["status"]) for s in families["http_requests"].samples}
    assert (CHAT, "200") in requests and ("other", "404") in requests


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_has_a_span_for_each_request(state, stream):
    exporter = InMemorySpanExporter()
    state.tracer = Tracer(exporter)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"prompt": ["the cat", "a secret dog"], "stream": stream, "top_p": 0.5, **GREEDY}
    before = time.time_ns()
    assert post(create_app(state), TEXT, body, headers={"traceparent": parent}).status == 200
    assert post(create_app(state), TEXT, {"prompt": "a", "temperature": -1}).status == 400
    state.tracer.shutdown()
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["llm_request"] * 2
    for span in spans:
        assert span.kind is SpanKind.SERVER and span.parent.span_id == 0xB7AD6B7169203331
        assert before <= span.start_time < span.end_time <= time.time_ns()
        values = {name.removeprefix("gen_ai."): value for name, value in span.attributes.items()}
        assert (values["request.max_tokens"], values["request.top_p"], values["request.n"]) == (8, 0.5, 1)
        assert values["usage.completion_tokens"] == 8 and values["usage.prompt_tokens"] > 0
        waiting, first = values["latency.time_in_queue"], values["latency.time_to_first_token"]
        assert 0 <= waiting < first < values["latency.e2e"]
        assert first == pytest.approx(waiting + values["latency.time_in_model_prefill"])
        assert "secret" not in str(span.attributes)


def test_a_log_line_says_nothing_of_the_prompt(app, caplog):
    with caplog.at_level("INFO", "nanopage"), contextlib.suppress(RuntimeError):
        post(app, TEXT, {"prompt": "a secret cat", **GREEDY})
    assert TEXT in caplog.text and "complete" in caplog.text and "secret" not in caplog.text


def test_the_schema_lists_the_fields(app):
    schema = get(app, "/openapi.json").json["components"]["schemas"]
    assert {"messages", "temperature", "max_completion_tokens"} <= schema["ChatBody"]["properties"].keys()
