import asyncio
import json

import httpx2
import pytest
from built.generate import generate
from built.server import Call, Service, make_app
from tokenizers import Tokenizer


@pytest.fixture
def tokenizer(model_dir):
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def post(engine, tokenizer, *bodies):
    """Send bodies at the same time. Returns: the responses."""

    async def send():
        transport = httpx2.ASGITransport(app=make_app(engine, tokenizer))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    return asyncio.run(send())


def test_calls_share_the_engine_and_get_their_own_answers(model, prompts, start, tokenizer):
    requests = [*prompts([7, 4]), "the cat and"]
    responses = post(start(), tokenizer, *({"prompt": prompt, "max_tokens": 6} for prompt in requests))
    for prompt, response in zip(requests, responses, strict=True):
        ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        (choice,) = response.json()["choices"]
        expected = generate(model, ids, 6, model.end_ids)
        assert choice["token_ids"] == expected and choice["text"] == tokenizer.decode(expected)
        assert choice["finish_reason"] == ("stop" if expected[-1] in model.end_ids else "length")


def test_a_stream_has_the_same_text_and_n_answers(start, tokenizer):
    body = {"prompt": "the cat", "max_tokens": 6, "n": 2, "temperature": 1.0, "seed": 3}
    whole, streamed = post(start(), tokenizer, body, body | {"stream": True})
    texts = {0: "", 1: ""}
    for line in streamed.text.split("\n\n")[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole.json()["choices"]}
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"max_tokens": "6"}, {"best_of": 3}, {"prompt": [999]}, {"n": 51}], ids=str
)
def test_what_is_wrong_with_a_call_is_the_callers_error(wrong, start, tokenizer):
    (response,) = post(start(), tokenizer, {"prompt": "the cat"} | wrong)
    assert response.status_code in (400, 422) and response.json()["detail"]


def test_a_request_that_nobody_reads_is_aborted(start, tokenizer):
    async def leave():
        service = Service(engine, tokenizer)
        call = Call(prompt="the cat", max_tokens=200)
        stream = service.stream(await service.add(call), call)
        await anext(stream)
        await stream.aclose()
        await service.task

    engine, steps = start(), []
    step = engine.step
    engine.step = lambda: steps.append("step") or step()
    asyncio.run(asyncio.wait_for(leave(), 60))
    assert not engine.has_unfinished() and engine.blocks.num_free == 100
    assert len(steps) < 20
