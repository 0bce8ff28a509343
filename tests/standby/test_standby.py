"""Engines that sleep, wake up and get other weights: their answers are those of a new engine, and errors change
nothing."""

import asyncio
import contextlib
import os
import signal
import threading

import psutil
import pytest
import torch
from asgi import call
from encoders import tiny_encoder
from helpers import ForkedLink, random_tokens, save_tokenizer, tiny_bart, tiny_hf_model, tiny_model
from safetensors.torch import load_file, save_file
from test_gguf import SMOLLM, model_for, write_gguf
from test_lora import save_adapter

from nanopage import LLM, AsyncLLM, EngineArgs, LoRARequest, SamplingParams
from nanopage.distributed import process_executor
from nanopage.outputs import EngineAsleepError
from nanopage.server.app import create_app
from nanopage.server.serve import check_replicas, parser
from nanopage.server.state import ServerState
from nanopage.standby import given
from nanopage.standby.engine import TAGS
from nanopage.step import WorkerDiedError

OPTIONS = {"device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64, "block_size": 8, "enforce_eager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": tokens} for tokens in random_tokens([17, 1, 30])]
pytestmark = pytest.mark.usefixtures("one_thread")


def load(model, **options) -> LLM:
    return LLM(str(model), **OPTIONS | {"dtype": "float32"} | options)


def answers(llm, **arguments) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False, **arguments)]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The directory of a model of the same shape as `model`."""
    return tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(process_executor, "ProcessLink", ForkedLink)


# Weights


KINDS = {
    "floats": ("llama", {}, {"dtype": "float64"}),  # oneDNN has no layout for them
    "packed, tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "bfloat16": ("llama", {}, {"dtype": "bfloat16"}),
    "int8": ("llama", {}, {"quantization": "int8"}),
    "int4": ("llama", {}, {"quantization": "int4"}),
    "experts": ("mixtral", {}, {}),
    "buffers": ("gemma3_text", {}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_give_the_answers_of_a_new_engine(kind, tmp_path):
    family, fields, options = KINDS[kind]
    models = [tiny_model(tmp_path / str(seed), family, seed=seed, **fields) for seed in (0, 1)]
    first, second = (answers(load(model, **options)) for model in models)
    llm = load(models[0], **options)
    assert answers(llm) == first != second  # and the prefix cache knows the prompts
    llm.update_weights(models[1])
    assert answers(llm) == second
    llm.update_weights(tiny_hf_model(family, seed=0, **fields).state_dict())
    assert answers(llm) == first


def test_all_ways_to_give_weights(model, other, tmp_path, monkeypatch):
    llm, expected = load(model), answers(load(other))
    tensors = load_file(other / "model.safetensors")
    save_file(tensors, tmp_path / "weights.safetensors")
    monkeypatch.setattr(given, "FILE_BYTES", 20_000)  # several files
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for weights in (str(other), other / "model.safetensors", tmp_path / "weights.safetensors", iter(tensors.items())):
        llm.update_weights(model)
        llm.update_weights(weights)
        assert answers(llm) == expected
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


def test_random_weights_become_real_ones(model):
    llm = load(model, load_format="dummy")
    llm.update_weights(model)
    assert answers(llm) == answers(load(model))


def test_adapters_stay(model, other, tmp_path):
    adapter = LoRARequest("a", 1, str(save_adapter(tmp_path / "a", model)))
    llm, new = (load(each, enable_lora=True) for each in (model, other))
    answers(llm, lora_request=adapter)
    llm.update_weights(other)
    assert answers(llm, lora_request=adapter) == answers(new, lora_request=adapter) != answers(llm) == answers(new)


def without(tensors, name):
    return {other: tensor for other, tensor in tensors.items() if other != name}


def test_an_error_changes_nothing(model, other, tmp_path):
    llm, tensors = load(model), load_file(other / "model.safetensors")
    expected, head = answers(llm), "lm_head.weight"
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((other / "model.safetensors").read_bytes()[:-9])
    for weights, kind, message in (
        (without(tensors, head), ValueError, f"missing: {head}"),
        (tensors | {"more": tensors[head]}, ValueError, "unexpected: more"),
        (tensors | {head: tensors[head][:-1]}, ValueError, f"mis-shaped: {head}"),
        (tensors | {head: tensors[head].to(torch.int32)}, ValueError, f"type not supported: {head}"),
        (tensors | {head: tensors[head] / 0}, ValueError, "lm_head.weight has values that are NaN or"),
        ([*tensors.items(), (head, tensors[head])], ValueError, "'lm_head.weight' is there twice"),
        ([("a", 1)], TypeError, r"pairs \(name, tensor\), not \('a', int\)"),
        (["ab"], TypeError, r"pairs \(name, tensor\), not 'ab'"),
        ([], ValueError, "there are none"),
        (5, TypeError, "a path or pairs"),
        (tmp_path / "nowhere", FileNotFoundError, "no weights at .*nowhere"),
        (broken, ValueError, "truncated"),
    ):
        with pytest.raises(kind, match=message):
            llm.update_weights(weights)
        assert answers(llm) == expected, message


def test_weights_that_would_be_stored_in_another_way_are_refused(model, tmp_path):
    llm = load(model)
    llm.engine.executor.worker.wings.standby.weights[0] = torch.empty(3)
    with pytest.raises(ValueError, match="stored in other types"):
        llm.update_weights(model)
    scaled, tensors = load(model), load_file(model / "model.safetensors")
    expected = answers(scaled)
    with pytest.raises(ValueError, match="scales of K and V"):
        scaled.update_weights(tensors | {"model.layers.0.self_attn.k_scale": torch.tensor(2.0)})
    assert answers(scaled) == expected


def test_outputs_of_encoders_are_forgotten(tmp_path):
    prompt = {"encoder_prompt": PROMPTS[0], "decoder_prompt": PROMPTS[1]}
    for seed in (0, 1):
        tiny_bart(seed=seed).save_pretrained(tmp_path / str(seed))
        save_tokenizer(tmp_path / str(seed))
    llm, new = (load(tmp_path / str(seed), max_model_len=60) for seed in (0, 1))
    before, expected = (each.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for each in (llm, new))
    llm.sleep()
    llm.wake_up()
    llm.update_weights(tmp_path / "1")
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected != before


def test_a_model_of_vectors(tmp_path):
    llm = LLM(str(tiny_encoder(tmp_path / "model")), device="cpu", dtype="float32")
    before = llm.embed([[5, 6, 7]], use_tqdm=False)[0].outputs.embedding
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    llm.update_weights({name: tensor * 2 for name, tensor in tensors.items()})
    assert llm.embed([[5, 6, 7]], use_tqdm=False)[0].outputs.embedding != before
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(tensors)
    assert llm.embed([[5, 6, 7]], use_tqdm=False)[0].outputs.embedding == before


def test_a_gguf_file_keeps_its_weights(tmp_path):
    write_gguf(tmp_path / "x.gguf", model_for(SMOLLM), "llama", SMOLLM)
    llm = LLM(str(tmp_path / "x.gguf"), **OPTIONS | {"max_model_len": 64})
    for refused in (lambda: llm.update_weights(tmp_path), lambda: llm.sleep(2)):
        with pytest.raises(ValueError, match=r"does not work with x\.gguf"):
            refused()
    llm.sleep()
    llm.wake_up()


def test_an_interrupted_update_is_done_again(model, other, monkeypatch):
    llm = load(model)
    standby = llm.engine.executor.worker.wings.standby
    take, interrupted = standby.take, []

    def interrupt(worker):
        interrupted.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(standby, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.update_weights(other)
    with pytest.raises(EngineAsleepError, match="an update was interrupted"):
        answers(llm)
    monkeypatch.setattr(standby, "take", take)
    llm.update_weights(other)
    assert interrupted and answers(llm) == answers(load(other))


# Sleep


def test_a_sleeping_engine_gives_its_memory_back_and_refuses_requests(model):
    llm = load(model, num_gpu_blocks_override=1 << 14)
    expected, cache = answers(llm), llm.engine.executor.worker.kv_cache.tensor
    cache.fill_(1.0)
    before = psutil.Process().memory_info().rss
    llm.sleep()
    assert before - psutil.Process().memory_info().rss > 0.9 * cache.nbytes > 2**24
    assert llm.is_sleeping()
    with pytest.raises(EngineAsleepError, match=r"the engine sleeps \(kv_cache, weights\): call wake_up"):
        answers(llm)
    llm.wake_up(["weights"])
    with pytest.raises(EngineAsleepError, match=r"the engine sleeps \(kv_cache\)"):
        next(llm.stream(PROMPTS[0], GREEDY))
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping() and answers(llm) == expected
    llm.wake_up()  # it is awake


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_level_2_drops_the_weights(options, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    first, second = (tiny_model(tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1))
    llm = load(first, **options)
    llm.sleep(level=2)
    llm.sleep(level=1)  # brings nothing back
    with pytest.raises(RuntimeError, match=r"the weights sleep: call wake_up\(\['weights'\]\) first"):
        llm.update_weights(second)
    llm.wake_up()
    with pytest.raises(EngineAsleepError, match=r"has no weights: sleep\(level=2\) has dropped them"):
        answers(llm)
    weights = llm.engine.executor.worker.wings.standby.weights
    large = [tensor for tensor in weights if not tensor.is_mkldnn and tensor.nbytes > 2**16]
    assert large and all((tensor == 0).float().mean() > 0.8 for tensor in large)  # all but the first and the last page
    llm.update_weights(second)
    assert answers(llm) == answers(load(second, **options))


def test_what_is_refused(model):
    llm = load(model)
    for change, kind, message in (
        (lambda: llm.sleep(0), ValueError, "level=0 is not supported"),
        (lambda: llm.sleep(True), ValueError, "level=True is not supported"),
        (lambda: llm.sleep(1.0), ValueError, "level=1.0 is not supported"),
        (lambda: llm.wake_up("weights"), TypeError, "a list of"),
        (lambda: llm.wake_up(5), TypeError, "a list of"),
        (lambda: llm.wake_up(["graphs"]), ValueError, "'graphs' is neither 'weights' nor 'kv_cache'"),
    ):
        with pytest.raises(kind, match=message):
            change()
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    for change in (llm.sleep, lambda: llm.update_weights(model)):
        with pytest.raises(RuntimeError, match=r"request '\d+' has not ended: let it end, or abort it"):
            change()
    assert not llm.is_sleeping() and len([*stream]) == 11
    llm.sleep()


def test_a_request_that_was_made_before_is_refused_too(model):
    llm = load(model)
    (request,) = llm.make_requests(PROMPTS[:1], GREEDY)
    llm.sleep()
    with pytest.raises(EngineAsleepError):
        llm.engine.submit(request)
    llm.wake_up()
    llm.engine.submit(request)


def test_steps_in_flight_are_given_up(model):
    llm, stop = load(model, async_scheduling=True), answers(load(model))[0][5]
    expected = answers(llm)
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop], ignore_eos=True)
    llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert llm.engine.in_flight  # the step after a stop that was seen late
    llm.sleep()
    assert not llm.engine.in_flight
    llm.wake_up()
    assert answers(llm) == expected


def test_what_a_gpu_does(model, other, monkeypatch):
    """With tensors on a CPU: storages are emptied and filled again, and the ways to run a step are made anew."""
    llm, expected = load(model, dtype="float64"), answers(load(other, dtype="float64"))
    worker = llm.engine.executor.worker
    standby, ways = worker.wings.standby, worker.runner.ways
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr("nanopage.standby.worker.collect", lambda: None)  # takes seconds
    storages = [tensor.untyped_storage() for tensor in [*standby.weights, worker.kv_cache.tensor]]
    for level in (1, 2):
        before = answers(llm)
        for _ in range(2):  # the second time, there is nothing left to do
            standby._sleep_on_gpu(worker, level)
        assert not any(storage.nbytes() for storage in storages) and not worker.runner.ways
        standby.wake_up(worker, ["kv_cache"])
        assert not worker.runner.ways
        standby.wake_up(worker, ["weights"])
        assert all(storage.nbytes() for storage in storages) and worker.runner.ways not in ([], ways)
        llm.reset_prefix_cache()
        if level == 2:
            llm.update_weights(other)
        assert answers(llm) == (before if level == 1 else expected)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"enforce_eager": True}], ids=str)
def test_on_a_gpu(model, other, options):
    options = {"device": "cuda", "enforce_eager": False, "block_size": 16} | options
    llm, new = load(model, **options), load(other, **options)
    first, second = answers(llm), answers(new)
    before = torch.cuda.memory_allocated()
    llm.sleep()
    assert torch.cuda.memory_allocated() < before
    llm.wake_up()
    assert answers(llm) == first
    llm.update_weights(other)
    assert answers(llm) == second
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    llm.update_weights(model)
    llm.wake_up(["kv_cache"])
    assert answers(llm) == first


# Workers in processes


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_workers_in_processes(sizes, forked, tmp_path):
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    first, second = (tiny_model(tmp_path / str(seed), seed=seed, **fields) for seed in (0, 1))
    options = {"dtype": "float64", "tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    llm = load(first, **options)
    expected = answers(llm)
    assert expected == answers(load(first, dtype="float64"))
    with pytest.raises(ValueError, match=r"rank \d: .* do not fit"):
        llm.update_weights({"a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"rank 0: .* has no \.safetensors weights"):
        llm.engine.executor.call("load", str(tmp_path / "nowhere"))
    assert answers(llm) == expected
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(second)
    assert answers(llm) == answers(load(second, dtype="float64"))
    os.kill(llm.engine.executor.links[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 of 2"):
        llm.sleep()
    llm.engine.shutdown()


def test_an_answer_to_a_call_that_was_interrupted_is_dropped(forked, model, monkeypatch):
    llm = load(model, distributed_executor_backend="mp")
    executor, expected = llm.engine.executor, answers(llm)
    receive = executor._receive

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(executor, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.sleep()
    assert llm.is_sleeping()
    monkeypatch.setattr(executor, "_receive", receive)
    llm.wake_up()
    assert not llm.is_sleeping() and answers(llm) == expected
    llm.engine.shutdown()


# asyncio and the server


@contextlib.contextmanager
def running(model):
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model), **OPTIONS | {"dtype": "float32"}))
    try:
        yield llm
    finally:
        llm.shutdown()


async def final(llm, request_id):
    async for output in llm.generate(PROMPTS[0], GREEDY, request_id):
        last = output
    return last.outputs[0].token_ids


def test_coroutines(model, other):
    async def check(llm):
        before, step = await final(llm, "a"), llm.engine.step
        in_step, may_go_on = threading.Event(), threading.Event()
        llm.engine.step = lambda: (in_step.set(), may_go_on.wait(60), step())[2]
        slow = asyncio.ensure_future(final(llm, "b"))
        await asyncio.to_thread(in_step.wait, 60)
        refused = asyncio.ensure_future(llm.sleep())
        await asyncio.sleep(0.01)  # it has asked
        may_go_on.set()
        with pytest.raises(RuntimeError, match="request 'b' has not ended"):
            await refused
        assert await slow == before
        await llm.sleep()
        assert await llm.is_sleeping()
        with pytest.raises(EngineAsleepError):
            await final(llm, "c")
        await llm.wake_up()
        assert not await llm.is_sleeping() and await final(llm, "d") == before
        await llm.update_weights(other)
        return await final(llm, "e")

    with running(model) as llm:
        assert asyncio.run(check(llm)) == answers(load(other))[0]


def test_the_server(model, monkeypatch):
    ask = {"prompt": "the cat", "temperature": 0, "max_tokens": 8}

    def reply(app, method, path, body=None, query="", **headers):
        async def with_query(scope, receive, send):
            await app(scope | {"query_string": query.encode()}, receive, send)

        return asyncio.run(call(with_query, method, path, body, headers=headers))

    with running(model) as llm:
        closed = create_app(ServerState(["tiny"], llm=llm), hosts=["localhost"])
        assert "--allow-sleep" in reply(closed, "POST", "/sleep").error["message"]
        app = create_app(ServerState(["tiny"], llm=llm, allow_sleep=True), hosts=["localhost"])
        text = reply(app, "POST", "/v1/completions", ask).json["choices"][0]["text"]
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "has_unfinished_requests", lambda: True)
            patch.setattr(llm.engine.output_processor, "requests", {"x": None})
            busy = reply(app, "POST", "/sleep")
        assert (busy.status, busy.error["message"][:31]) == (409, "sleep(): request 'x' has not en")
        for path, query, status in (
            ("/sleep", "level=2", 400),
            ("/sleep", "level=x", 400),
            ("/sleep", "mode=abort", 400),
            ("/wake_up", "tags=graphs", 400),
            ("/sleep", "level=1", 200),
        ):
            assert reply(app, "POST", path, query=query).status == status, query
        assert reply(app, "POST", "/wake_up", origin="http://elsewhere").status == 403
        assert reply(app, "GET", "/is_sleeping").json == {"is_sleeping": True}
        refused = reply(app, "POST", "/v1/completions", ask)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "asleep", "30")
        assert reply(app, "GET", "/health").status == 200
        for tag in TAGS:
            assert reply(app, "POST", "/wake_up", query=f"tags={tag}").status == 200
        assert reply(app, "POST", "/v1/completions", ask).json["choices"][0]["text"] == text
    with pytest.raises(ValueError, match="--allow-sleep does not work with --replicas"):
        check_replicas(parser().parse_args(["--allow-sleep", "--replicas", "2"]))
