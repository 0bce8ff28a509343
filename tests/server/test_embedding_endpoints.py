"""Embeddings, scores and ranks through the HTTP API, in this process."""

import asyncio
import base64
import importlib

import numpy as np
import openai
import pytest
from asgi import call, get, post
from encoders import texts, tiny_encoder, write_modules
from server_process import OPTIONS

from nanopage import LLM, AsyncLLM, EngineArgs, PoolingParams
from nanopage.server.app import create_app
from nanopage.server.state import ServerState

EMBEDDINGS, TEXTS = "/v1/embeddings", texts(6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    files = {"config_sentence_transformers": {"prompts": {"query": "who is "}}}
    return write_modules(tiny_encoder(tmp_path_factory.mktemp("bert")), **files)


@pytest.fixture(scope="module")
def offline(directory):
    return LLM(str(directory), device="cpu")


def serve(model, **options):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), device="cpu", **options))
    return llm, create_app(ServerState(["tiny"], llm=llm), hosts=["localhost"])


@pytest.fixture(scope="module")
def app(directory):
    llm, app = serve(directory)
    yield app
    llm.shutdown()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    llm, app = serve(tiny_encoder(tmp_path_factory.mktemp("reranker"), num_labels=1))
    yield app
    llm.shutdown()


def embedded(reply):
    return [item["embedding"] for item in sorted(reply.json["data"], key=lambda item: item["index"])]


def test_embeddings_of_every_form_are_those_of_the_offline_engine(app, offline):
    outputs = offline.embed(TEXTS, use_tqdm=False)
    expected = np.array([output.outputs.embedding for output in outputs])
    ids = [output.prompt_token_ids for output in outputs]
    for inputs in (TEXTS, ids):
        reply = post(app, EMBEDDINGS, {"model": "tiny", "input": inputs})
        assert reply.json["object"] == "list" and reply.json["model"] == "tiny"
        assert np.abs(embedded(reply) - expected).max() < 1e-6
        assert reply.json["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    for one in (TEXTS[0], ids[0]):
        assert np.abs(embedded(post(app, EMBEDDINGS, {"input": one}))[0] - expected[0]).max() < 1e-6
    reply = post(app, EMBEDDINGS, {"input": TEXTS, "encoding_format": "base64", "user": "me"})
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in embedded(reply)]
    assert np.abs(np.array(decoded) - expected).max() < 1e-6
    fields = {"dimensions": 5, "normalize": False, "prompt_name": "query"}
    (output,) = offline.embed(TEXTS[0], pooling_params=PoolingParams(**fields), use_tqdm=False)
    assert embedded(post(app, EMBEDDINGS, {"input": TEXTS[0]} | fields))[0] == output.outputs.embedding


def test_the_openai_sdk_embeds(app, offline):
    async def create(**fields):
        library = importlib.import_module(openai.DefaultAsyncHttpxClient.__base__.__module__.split(".")[0])
        transport = library.ASGITransport(app=app)  # of httpx or httpx2, whichever this version of the SDK has
        async with openai.DefaultAsyncHttpxClient(transport=transport) as client:
            sdk = openai.AsyncOpenAI(base_url="http://localhost:8000/v1", api_key="any", http_client=client)
            return await sdk.embeddings.create(model="tiny", input=TEXTS, **fields)

    expected = np.array([output.outputs.embedding for output in offline.embed(TEXTS, use_tqdm=False)])
    for fields in ({}, {"encoding_format": "float"}):  # the SDK asks for base64 by itself
        reply = asyncio.run(create(**fields))
        assert np.abs(np.array([item.embedding for item in reply.data]) - expected).max() < 1e-6
        assert [item.index for item in reply.data] == list(range(len(TEXTS)))


def test_scores_and_ranks(app, reranker, offline):
    query, documents = TEXTS[0], TEXTS[1:]
    scores = [output.outputs.score for output in offline.score(query, documents, use_tqdm=False)]
    for path in ("/v1/score", "/score"):
        data = post(app, path, {"text_1": query, "text_2": documents}).json["data"]
        assert [item["score"] for item in data] == pytest.approx(scores, abs=1e-6)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:3]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        body = {"query": query, "documents": [documents[0], *({"text": text} for text in documents[1:])], "top_n": 3}
        results = post(app, path, body).json["results"]
        assert [result["index"] for result in results] == best
        assert [result["document"]["text"] for result in results] == [documents[index] for index in best]
        assert [result["relevance_score"] for result in results] == pytest.approx([scores[i] for i in best], abs=1e-6)
    results = post(app, "/rerank", body | {"return_documents": False}).json["results"]
    assert all(result.keys() == {"index", "relevance_score"} for result in results)
    raw = post(reranker, "/score", {"text_1": query, "text_2": documents, "use_activation": False}).json["data"]
    data = post(reranker, "/score", {"text_1": query, "text_2": documents}).json["data"]
    expected = 1 / (1 + np.exp([-item["score"] for item in raw]))
    assert [item["score"] for item in data] == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ["a"] * 1025}, "input"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "dimensions": 33}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "prompt_name": "x"}, "prompt_name"),
        (EMBEDDINGS, {"input": "a " * 100}, "input"),
        (EMBEDDINGS, {"input": "\ud800"}, "input"),
        (EMBEDDINGS, {"input": [[99]]}, "input"),
        (EMBEDDINGS, {"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        (EMBEDDINGS, {"input": "a", "use_activation": False}, "use_activation"),
        (EMBEDDINGS, {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        (EMBEDDINGS, {"input": "a", "endianness": "big"}, "endianness"),
        ("/v2/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        (EMBEDDINGS, {"input": "a", "stream": True}, "stream"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 100}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": ["a", "a"], "text_2": ["a"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "a", "use_activation": True}, "use_activation"),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 1025}, "text_2"),
        ("/v1/score", {"text_1": ["a"] * 300_000, "text_2": ["a"] * 300_000}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 1025}, "documents"),
        ("/v2/rerank", {"query": "a", "documents": [{"text": "a"}] * 200_000}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"image": "b"}]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(app, path, body, param):
    reply = post(app, path, body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert "prompt_token_ids" not in reply.error["message"]


def test_what_a_model_does_not_make_is_a_404_that_names_model_and_endpoint(app, reranker, model):
    llm, text_app = serve(model, num_gpu_blocks_override=OPTIONS["num_gpu_blocks_override"])
    score = {"text_1": "a", "text_2": "a"}
    cases = [
        (text_app, EMBEDDINGS, {"input": "a"}),
        (text_app, "/v1/score", score),
        (text_app, "/v1/rerank", {"query": "a", "documents": ["a"]}),
        (app, "/v1/completions", {"prompt": "a"}),
        (app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        (app, "/v1/responses", {"input": "a"}),
        (reranker, EMBEDDINGS, {"input": "a"}),
    ]
    for served, path, body in cases:
        reply = post(served, path, body)
        assert reply.status == 404 and reply.error["code"] == "not_served"
        assert "'tiny'" in reply.error["message"] and path in reply.error["message"]
    llm.shutdown()


def test_calls_at_once_share_batches_and_metrics_count_them(app, directory):
    async def crowd():
        calls = [call(app, "POST", EMBEDDINGS, {"input": text}) for text in TEXTS * 5]
        return await asyncio.gather(*calls)

    replies = asyncio.run(crowd())
    alone = [embedded(post(app, EMBEDDINGS, {"input": text}))[0] for text in TEXTS]
    for number, reply in enumerate(replies):
        assert np.abs(np.array(embedded(reply)[0]) - alone[number % len(TEXTS)]).max() < 1e-5
    metrics = get(app, "/metrics").body.decode()
    assert 'handler="/v1/embeddings"' in metrics
    counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("vllm:"))
    (ended,) = (value for name, value in counts.items() if "success" in name and 'finished_reason="stop"' in name)
    (tokens,) = (value for name, value in counts.items() if name.startswith("vllm:prompt_tokens_total"))
    assert float(ended) >= len(replies) + len(alone) and float(tokens) > float(ended)
