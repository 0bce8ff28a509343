"""Images in the server's endpoints."""

import asyncio
import contextlib
import json
import time

import openai
import pytest
from asgi import call
from seeing import data_url, documented, file_of, idefics_model, picture, qwen_model
from server_process import serving

from nanopage import LLM, AsyncLLM, EngineArgs, SamplingParams
from nanopage.server.app import create_app
from nanopage.server.middleware import MAX_BODY
from nanopage.server.state import ServerState

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = "/v1/chat/completions"
OPTIONS = {"enforce_eager": True, "num_gpu_blocks_override": 150, "device": "cpu"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smolvlm")
    idefics_model(directory)
    return directory


@pytest.fixture(scope="module")
def llm(directory):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(directory), limit_mm_per_prompt={"image": 2}, **OPTIONS))
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def app(llm):
    state = ServerState(["tiny"], llm=llm)
    return create_app(state, [], ["localhost"])


def message(*parts):
    content = [
        {"type": "text", "text": part}
        if not part.startswith("data:")
        else {"type": "image_url", "image_url": {"url": part}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def post(app, path=CHAT, **body):
    return asyncio.run(call(app, "POST", path, {"max_tokens": 6, "temperature": 0, "ignore_eos": True} | body))


FIRST, SECOND = data_url(picture()), data_url(file_of(picture(60, 90, seed=1), "JPEG"))


def test_a_conversation_with_two_images_over_three_turns_through_the_sdk(directory, tmp_path):
    offline = LLM(str(directory), **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    arguments = (directory, "--max-model-len", 1024, "--limit-mm-per-prompt", "image=2", "--served-model-name", "tiny")
    messages = []
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(*arguments, log=tmp_path / "log")).wait_until_ready()
        client = stack.enter_context(openai.OpenAI(base_url=url, api_key="any", max_retries=0))
        create = client.chat.completions.create
        for parts in ((FIRST, "where is the cat?"), ("and the dog?",), ("in", SECOND, "the morning?")):
            messages.append(message(*parts))
            reply = create(model="tiny", messages=messages, **options)
            [expected] = offline.chat(messages, params, use_tqdm=False)
            assert reply.choices[0].message.content == expected.outputs[0].text
            assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
            if len(messages) > 1:
                assert reply.usage.prompt_tokens_details.cached_tokens > 150  # also the image
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        chunks = create(model="tiny", messages=messages[:1], stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == messages[1]["content"]
        with pytest.raises(openai.BadRequestError, match="3 images are more than 2"):
            create(model="tiny", messages=[message(FIRST, FIRST, FIRST)], **options)


def test_responses_take_images(app):
    content = [{"type": "input_text", "text": "the cat"}, {"type": "input_image", "image_url": FIRST, "detail": "auto"}]
    body = {"max_output_tokens": 6, "temperature": 0, "ignore_eos": True}
    reply = asyncio.run(call(app, "POST", "/v1/responses", body | {"input": [{"role": "user", "content": content}]}))
    chat = post(app, messages=[message("the cat", FIRST)])
    assert reply.json["output"][0]["content"][0]["text"] == chat.json["choices"][0]["message"]["content"]
    content[1]["image_url"] = "data:image/png;base64,AAAA"
    reply = asyncio.run(call(app, "POST", "/v1/responses", body | {"input": [{"role": "user", "content": content}]}))
    assert reply.status == 400 and reply.error["param"] == "input[0].content[1]"


def test_messages_take_images_also_in_results_of_tools(app):
    media, _, data = FIRST.removeprefix("data:").partition(";base64,")
    image = {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    content = [{"type": "text", "text": "the cat"}, image]
    reply = post(app, "/v1/messages", messages=[{"role": "user", "content": content}])
    chat = post(app, messages=[message("the cat", FIRST)])
    assert reply.json["content"][0]["text"] == chat.json["choices"][0]["message"]["content"]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    begun = [message("see"), {"role": "assistant", "content": "", "tool_calls": calls}]
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    chat = post(app, messages=[*begun, result, message(FIRST, "look")]).json
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    done = {"type": "tool_result", "tool_use_id": "1", "content": [image, {"type": "text", "text": "done"}]}
    conversation = [message("see"), {"role": "assistant", "content": [use]}]
    conversation.append({"role": "user", "content": [done, {"type": "text", "text": "look"}]})
    reply = post(app, "/v1/messages", messages=conversation).json
    assert reply["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    count = asyncio.run(call(app, "POST", "/v1/messages/count_tokens", {"messages": conversation})).json
    assert count["input_tokens"] == chat["usage"]["prompt_tokens"] > 150
    image["source"]["data"] = "AAAA"
    reply = asyncio.run(call(app, "POST", "/v1/messages", body | {"messages": conversation}))
    assert reply.status == 400 and reply.error["message"].startswith("messages[2].content[0].content[0]: ")


def part(**image):
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", **image}]}]


def url(text):
    return part(image_url={"url": text})


PLACE = "messages[0].content[1]"
REFUSED = {
    "no url": (part(), PLACE),
    "no text": (part(image_url={"url": 5}), f"{PLACE}.image_url"),
    "an unknown field": (part(image_url={"url": FIRST, "x": 1}), f"{PLACE}.image_url"),
    "low detail": (part(image_url={"url": FIRST, "detail": "low"}), f"{PLACE}.image_url.detail"),
    "not base64": (url("data:image/png;base64,%%%"), PLACE),
    "not an image": (url("data:image/png;base64,AAAA"), PLACE),
    "a truncated file": (url(data_url(file_of(picture())[:-100])), PLACE),
    "a web address": (url("http://localhost/a.png"), PLACE),
    "an address of a cloud": (url("http://169.254.169.254/latest/meta-data"), PLACE),
    "a file": (url("file:///etc/passwd"), PLACE),
    "too many": ([message(FIRST, FIRST, FIRST)], "messages"),
    "a placeholder as text": ([message("<image>", FIRST)], "messages"),
    "of an assistant": ([{**message(FIRST), "role": "assistant"}], "messages[0].content"),
    "many tokens": ([message(FIRST, "the cat " * 2000)], "messages"),
}


@pytest.mark.parametrize(("name", "error"), documented("call").items())
def test_what_is_wrong_with_an_image_is_said(app, name, error):
    messages, param = REFUSED[name]
    reply = post(app, messages=messages)
    assert (reply.status, reply.error["param"]) == (400, param) and reply.error["message"].startswith(error)
    assert "/" not in reply.error["message"] or "data:" in reply.error["message"]


def test_all_refused_calls_are_documented():
    assert documented("call").keys() == REFUSED.keys()


@pytest.mark.parametrize("size", [(1, 1), (10_000, 10), (3, 900)])
def test_images_of_extreme_shapes_are_read(app, size):
    assert post(app, messages=[message(data_url(picture(*size)), "the cat")]).status == 200


def test_images_of_any_size_become_as_many_tokens(tmp_path):
    """With Qwen2.5-VL, which refuses images that are too long, and videos."""
    qwen_model(tmp_path)
    offline = LLM(str(tmp_path), **OPTIONS)
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(tmp_path), **OPTIONS))
    try:
        app = create_app(ServerState(["tiny"], llm=llm), [], ["localhost"])
        messages = [message("in the", FIRST, "cat", SECOND, "where?")]
        reply = post(app, messages=messages)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        [expected] = offline.chat(messages, params, use_tqdm=False)
        assert reply.json["choices"][0]["message"]["content"] == expected.outputs[0].text
        assert reply.json["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
        assert post(app, messages=[message(data_url(picture(1, 1)), "the cat")]).status == 200
        reply = post(app, messages=[message(data_url(picture(10_000, 10)), "the cat")])
        assert reply.status == 400 and "more than 200 times" in reply.error["message"]
        video = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]
        reply = post(app, messages=[{"role": "user", "content": video}])
        assert reply.status == 400 and "video_url" in reply.error["message"]
        for part in ({"type": "video", "video": "a.mp4"}, video[0]):
            with pytest.raises(ValueError, match=part["type"]):
                offline.chat([{"role": "user", "content": [part]}], params, use_tqdm=False)
    finally:
        llm.shutdown()


def test_bodies_with_images_may_be_large(app):
    padded = json.dumps({"messages": url("data:image/png;base64,AAAA"), "user": "x" * MAX_BODY}).encode()
    assert asyncio.run(call(app, "POST", CHAT, padded)).error["param"] == PLACE
    huge = asyncio.run(call(app, "POST", CHAT, b" " * (33 << 20)))
    assert huge.status == 413 and "32 MiB" in huge.error["message"]


def test_calls_wait_while_images_fill_the_memory(app, llm, monkeypatch):
    assert post(app, messages=[message(data_url(picture(seed=9)), "the cat")]).status == 200
    reader = llm.engine.input_processor.prompts.item_readers["multi_modal_data"]

    def frees(num_bytes):
        """Whether only so many bytes are left soon: the engine's thread may still have the last step."""
        deadline = time.monotonic() + 60
        while reader.bytes_in_memory > num_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        return reader.bytes_in_memory == num_bytes

    kept = reader._num_bytes()
    assert kept and frees(kept)
    monkeypatch.setattr("nanopage.server.images.MOST_BYTES", kept - 1)
    reply = post(app, messages=[message(FIRST, "the cat")])
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "too_many_images", "1")
    assert post(app, messages=[message("the cat")]).status == 200
    reader.prepared.clear()
    assert frees(0) and post(app, messages=[message(FIRST, "the cat")]).status == 200


def test_tokenize_refuses_images(app):
    reply = asyncio.run(call(app, "POST", "/tokenize", {"messages": [message(FIRST)]}))
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "messages", "unsupported")


def test_a_model_without_sight_refuses_images(model):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS))
    try:
        reply = post(create_app(ServerState(["tiny"], llm=llm), [], ["localhost"]), messages=[message("a", FIRST)])
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, PLACE, "unsupported")
    finally:
        llm.shutdown()
