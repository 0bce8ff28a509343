"""LoRA adapters: the same tokens and log-probabilities as PEFT's, whatever else is in the batch. What is refused."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import BytesExecutor, ForkedLink, random_tokens, tiny_hf_model, tiny_model
from on_a_cpu import graphs_for
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanopage import LLM, BeamSearchParams, EngineConfig, LoRARequest, SamplingParams
from nanopage.adapters import weights as adapter_weights
from nanopage.build import build_engine
from nanopage.layers.attention import StepContext
from nanopage.server.adapters import ServedAdapters

pytestmark = pytest.mark.usefixtures("one_thread")

MODULES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True, detokenize=False)
OPTIONS = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "max_model_len": 64, "kv_cache_gib": 0.01}
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def save_adapter(directory, model, targets=tuple(MODULES), rank=4, alpha=8.0, rslora=False, seed=0, dtype=None):
    """A random adapter of a model's directory, in PEFT's format. Returns the directory."""
    weights = load_file(model / "model.safetensors")
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in weights.items():
        module = name.split(".")[-2]
        if module not in targets:
            continue
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith(".bias"):
            continue
        a = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
        b = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
        tensors |= {f"{prefix}.lora_A.weight": a.to(dtype), f"{prefix}.lora_B.weight": b.to(dtype)}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "base_model_name_or_path": str(model),
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    """Four adapters of different ranks, scales and targets."""
    made = tmp_path_factory.mktemp("adapters")
    kinds = [
        {"rank": 4},
        {"rank": 8, "alpha": 4.0, "rslora": True},
        {"rank": 1, "targets": ("q_proj", "v_proj"), "alpha": 16},
        {"rank": 3, "targets": ("down_proj", "k_proj", "gate_proj")},
    ]
    paths = [save_adapter(made / str(i), model, seed=i, **kind) for i, kind in enumerate(kinds)]
    return [LoRARequest(f"adapter-{i}", i + 1, str(path)) for i, path in enumerate(paths)]


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), **OPTIONS, **LORA)


def with_peft(model, request):
    """transformers' model with PEFT's adapter."""
    from peft import PeftModel

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return hf if request is None else PeftModel.from_pretrained(hf, request.lora_path).eval()


def check_against(hf, output):
    """Each token is the likeliest of transformers', with its log-probability."""
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        logprobs = hf(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    for position, table in enumerate(output.outputs[0].logprobs, start=len(output.prompt_token_ids)):
        expected = logprobs[position - 1]
        assert tokens[position] == int(expected.argmax())
        for token_id, logprob in table.items():
            assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=2e-3)


def answers(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "olmo2", "granite"])
def test_every_target_module_as_in_peft(family, tmp_path):
    model = tiny_model(tmp_path / "model", family)
    requests = [
        LoRARequest(module, i + 1, str(save_adapter(tmp_path / module, model, (module,), seed=i)))
        for i, module in enumerate(MODULES)
    ]
    requests.append(LoRARequest("all", 8, str(save_adapter(tmp_path / "all", model, rank=8, rslora=True))))
    llm = LLM(str(model), **OPTIONS, enable_lora=True, max_loras=8, max_lora_rank=8)
    prompt = random_tokens([9])[0]
    outputs = llm.generate([prompt] * 9, GREEDY, lora_request=[*requests, None], use_tqdm=False)
    for request, output in zip([*requests, None], outputs, strict=True):
        check_against(with_peft(model, request), output)
    assert len({str(output.outputs[0].logprobs[0]) for output in outputs}) == 9


def test_several_adapters_and_none_in_one_batch(llm, model, adapters):
    requests = [adapters[0], None, adapters[1], adapters[2], adapters[0], None, adapters[1]]
    prompts = random_tokens([5, 17, 3, 30, 8, 5, 1], seed=1)
    outputs = llm.generate(prompts, GREEDY, lora_request=requests, use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        check_against(with_peft(model, request), output)


def test_more_adapters_than_slots(llm, adapters, model):
    """The least recently used one gives way. A request waits while running requests have all slots."""
    slots = llm.engine.scheduler.adapter_slots
    (prompt,) = random_tokens([7], seed=2)
    order = [adapters[i] for i in (0, 1, 2, 0, 3, 1)]
    alone = [llm.generate([prompt], GREEDY, lora_request=request, use_tqdm=False)[0] for request in order]
    assert list(slots.held) == [1, 4, 2]  # 3 was read the longest time ago when 4 came; then 2 had to come back
    for request, output in zip(order, alone, strict=True):
        check_against(with_peft(model, request), output)
    together = llm.generate([prompt] * 6, GREEDY, lora_request=order, use_tqdm=False)
    assert answers(together) == answers(alone)


def test_prefixes_are_not_shared_among_adapters(llm, adapters):
    (prompt,) = random_tokens([50], seed=3)
    ask = SamplingParams(temperature=0, max_tokens=1)

    def cached(request, salt=""):
        prompts = [{"prompt_token_ids": prompt, "cache_salt": salt}]
        return llm.generate(prompts, ask, lora_request=request, use_tqdm=False)[0].num_cached_tokens

    llm.reset_prefix_cache()
    for request in (None, adapters[0], adapters[1]):
        assert cached(request) == 0
    for request in (None, adapters[0], adapters[1]):
        assert cached(request) == 48
    for salt in ("1 ", "0 ", " ", "1"):  # a client's salt is not taken for an adapter
        assert cached(None, salt) == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_forks_and_beams(model, adapters, mode):
    """In a pool that holds about one request, between processes' messages, the answers are those of each alone."""
    options = OPTIONS | {"kv_cache_gib": None, "num_gpu_blocks_override": 11, "block_size": 4, "max_model_len": 32}
    engine = build_engine(EngineConfig(model=str(model), preemption_mode=mode, **options, **(LORA | {"max_loras": 2})))
    engine.executor = BytesExecutor(engine.executor)
    roomy = LLM(str(model), **OPTIONS, **LORA)
    prompts = random_tokens([6, 9, 4, 7, 5, 8], seed=4)
    sampled = SamplingParams(temperature=1, seed=5, n=2, max_tokens=12, ignore_eos=True, detokenize=False)
    beams = BeamSearchParams(width=2, max_tokens=8)
    plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    params = [plain, sampled, beams, plain, sampled, plain]
    requests = [adapters[0], adapters[1], adapters[2], None, adapters[3], adapters[1]]
    for i, (prompt, param, request) in enumerate(zip(prompts, params, requests, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, param, lora_request=request)
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        running = {group.adapter for group in engine.scheduler.running} - {None}
        assert len(running) <= 2
    assert engine.scheduler.queues.num_preemptions > 0
    for i, (prompt, param, request) in enumerate(zip(prompts, params, requests, strict=True)):
        run = roomy.beam_search if isinstance(param, BeamSearchParams) else roomy.generate
        (expected,) = run([{"prompt_token_ids": prompt}], param, lora_request=request, use_tqdm=False)
        assert finished[str(i)].error is None
        assert answers([finished[str(i)]]) == answers([expected]), i


def test_static_buffers_of_cuda_graphs(model, adapters):
    """What a GPU captures, without capture: the slots come from the table, padding has none."""
    plain = LLM(str(model), **OPTIONS, **LORA)
    static = LLM(str(model), **OPTIONS, **LORA)
    runner, ran = static.engine.executor.worker.runner, []
    graphs = graphs_for(runner.model, runner.kv_cache, runner.table)
    run = graphs.run
    graphs.run = lambda batch: ran.append(len(batch.rows)) or run(batch)
    runner.ways = [graphs, *runner.ways]
    requests, prompts = [adapters[0], None, adapters[1]], random_tokens([5, 9, 3], seed=6)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = [each.generate(prompts, GREEDY, lora_request=requests, use_tqdm=False) for each in (plain, static)]
    assert answers(results[0]) == answers(results[1])
    assert ran.count(3) >= 4


def test_an_engine_in_another_process(model, adapters, monkeypatch):
    monkeypatch.setattr("nanopage.distributed.process_executor.ProcessLink", ForkedLink)
    prompts = [{"prompt_token_ids": prompt} for prompt in random_tokens([5, 9], seed=7)]
    expected = LLM(str(model), **OPTIONS, **LORA).generate(prompts, GREEDY, lora_request=adapters[:2], use_tqdm=False)
    llm = LLM(str(model), **OPTIONS, **LORA, distributed_executor_backend="mp")
    try:
        assert answers(llm.generate(prompts, GREEDY, lora_request=adapters[:2], use_tqdm=False)) == answers(expected)
    finally:
        llm.engine.shutdown()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_beside_quantized_weights(model, adapters, quantization):
    """The products of adapters are added to those of the quantized weights."""
    llm = LLM(str(model), **OPTIONS, **LORA, quantization=quantization)
    layer = llm.engine.executor.worker.model.layers[0].self_attn.o_proj
    assert type(layer.weight.weight).__name__ == "TiledWeight"
    x = torch.randn(3, 64)
    (prompt,) = random_tokens([7])
    base, adapted = (
        llm.generate([prompt], GREEDY, lora_request=request, use_tqdm=False)[0] for request in (None, adapters[0])
    )
    assert base.outputs[0].logprobs[0] != adapted.outputs[0].logprobs[0]
    weights = load_file(f"{adapters[0].lora_path}/adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
    added = 2.0 * x @ weights[name.format("A")].T @ weights[name.format("B")].T
    slots = adapters_of_slot(llm, adapters[0], len(x))
    layer.weight.running.step = SimpleNamespace(adapters=slots)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x) - layer.weight.weight.product(x), added, rtol=1e-3, atol=1e-4)


def adapters_of_slot(llm, request, num_tokens):
    slot = llm.engine.scheduler.adapter_slots.held[request.lora_int_id]
    return torch.full((num_tokens,), slot)


def test_the_last_layer_keeps_the_slots_of_the_rows_that_it_keeps():
    slots, x = torch.tensor([-1, 0, 1]), torch.arange(3)
    step = StepContext(x, [], [0, 0], [], rows=torch.tensor([2]), adapters=slots)
    assert step.keep(SimpleNamespace(index=0), x) == (x,) and step.adapters is slots
    (kept,) = step.keep(SimpleNamespace(index=1), x)
    assert kept.tolist() == [2] and step.adapters.tolist() == [1]


def test_without_adapters_nothing_is_added(model):
    worker = LLM(str(model), **OPTIONS).engine.executor.worker
    assert type(worker.model).__name__ == "Decoder" and worker.wings.load_adapters([]) == {}
    assert type(worker.runner.ways[0]).__name__ == "Eager" and worker.runner.table.adapter_slots is None


# What is refused


def test_a_family_whose_layers_are_of_another_kind_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    tiny_hf_model("phi3").save_pretrained(tmp_path)
    monkeypatch.setattr("nanopage.weights.loader.load_model", None)
    with pytest.raises(ValueError, match="enable_lora does not work with this model"):
        build_engine(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", enable_lora=True))


@pytest.fixture
def adapter(model, tmp_path):
    return save_adapter(tmp_path / "adapter", model)


def change(adapter, **fields):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def retensor(adapter, function):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    function(tensors)
    save_file(tensors, file)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 9}, "r=9 is more than max_lora_rank=8"),
        ({"r": 0}, "r must be an integer from 1"),
        ({"r": True}, "r must be an integer"),
        ({"r": 2**70}, "more than max_lora_rank"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"lora_alpha": 1e300}, "lora_alpha must be a number of at most"),
        ({"use_rslora": "no"}, "use_rslora must be true or false"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"new_kind_of_lora": 0.5}, "'new_kind_of_lora'=0.5 is not known"),
        ({"kasa_config": {"beta": 1}}, "'kasa_config'=.* is not known"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*lm_head.* is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.*q_proj.* is not supported"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern=.*q_proj.* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: 'lm_head' is not supported; supported: q_proj"),
        ({"target_modules": ["embed_tokens"]}, "'embed_tokens' is not supported"),
        ({"target_modules": []}, "target_modules must be a list"),
        ({"target_modules": ["q_proj"]}, "not one of target_modules: .*k_proj"),
        ({"layers_to_transform": [0]}, "not one of target_modules: .*layers.1"),
        ({"layers_to_transform": "0"}, "layers_to_transform must be a list of integers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_is_not_supported(llm, adapter, fields, message):
    change(adapter, **fields)
    with pytest.raises(ValueError, match=f"(?s)adapter 'bad': .*{message}"):
        llm.generate(["the"], GREEDY, lora_request=LoRARequest("bad", 99, str(adapter)), use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def spoil(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            spoil(FIRST, torch.zeros(4, 63)),
            r"mis-shaped: .*q_proj.* is \[4, 63\], the model wants \[4, 64\]",
        ),
        (spoil(FIRST, torch.zeros(5, 64)), "mis-shaped"),
        (spoil(FIRST, torch.zeros(64)), "mis-shaped"),
        (spoil(FIRST, torch.zeros(4, 64, dtype=torch.int8)), "type not supported"),
        (lambda tensors: tensors.pop(FIRST), r"missing: lora_A of layers.0.self_attn.q_proj"),
        (lambda tensors: tensors.clear(), "missing: lora_A"),
        (spoil(FIRST.replace("layers.0", "layers.2"), torch.zeros(4, 64)), "unexpected: .*layers.2"),
        (spoil("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64)), "unexpected: .*lm_head"),
        (spoil("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 300)), "unexpected"),
        (spoil(FIRST.replace("lora_A", "lora_magnitude_vector"), torch.zeros(4)), "unexpected"),
        (spoil(FIRST.replace("lora_A", "lora_A.default"), torch.zeros(4, 64)), "twice"),
    ],
)
def test_tensors_that_do_not_fit(llm, adapter, function, message):
    retensor(adapter, function)
    with pytest.raises(ValueError, match=rf"(?s)adapter 'bad': .*adapter_model.safetensors does not fit.*{message}"):
        llm.generate(["the"], GREEDY, lora_request=LoRARequest("bad", 99, str(adapter)), use_tqdm=False)


def test_files_that_are_not_an_adapter(llm, adapter, tmp_path):
    def refused(path, message):
        with pytest.raises(ValueError, match=message):
            llm.generate(["the"], GREEDY, lora_request=LoRARequest("bad", 99, str(path)), use_tqdm=False)

    refused(tmp_path / "nowhere", "no such directory")
    refused(tmp_path, "it has no adapter_config.json")
    weights = adapter / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes((2**40).to_bytes(8, "little") + data[8:])
    refused(adapter, "its header has 1,099,511,627,776 bytes")
    weights.write_bytes(data[: len(data) // 2])
    refused(adapter, "not a readable safetensors file")
    header = json.dumps({FIRST: {"dtype": "F32", "shape": [2**62] * 400_000, "data_offsets": [0, 4]}}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(adapter, "400,000 dimensions")  # the product takes seconds
    weights.unlink()
    weights.symlink_to("/dev/zero")
    refused(adapter, "is not a regular file")
    weights.unlink()
    (adapter / "adapter_model.bin").write_bytes(b"")
    refused(adapter, "adapter_model.bin is pickled")
    (adapter / "adapter_config.json").write_text("[" * 10**5)
    refused(adapter, "not valid JSON")


def test_an_expression_of_targets(llm, adapter, adapters, model):
    """The tensors say what it matched."""
    change(adapter, target_modules=r".*_proj")
    outputs = llm.generate([[5, 6, 7]], GREEDY, lora_request=LoRARequest("e", 50, str(adapter)), use_tqdm=False)
    check_against(with_peft(model, adapters[0]), outputs[0])  # the same weights


def test_bf16_weights(llm, model, tmp_path):
    request = LoRARequest("bf16", 51, str(save_adapter(tmp_path / "bf16", model, seed=3, dtype=torch.bfloat16)))
    (output,) = llm.generate([[5, 6, 7]], GREEDY, lora_request=request, use_tqdm=False)
    check_against(with_peft(model, request), output)


def test_requests_and_options(llm, adapters, model):
    first = adapters[0]
    with pytest.raises(ValueError, match="lora_int_id=1 is already that of 'adapter-0'"):
        other = LoRARequest("other", 1, adapters[1].lora_path)
        llm.generate(["the"], lora_request=[first], use_tqdm=False)
        llm.generate(["the"], lora_request=other, use_tqdm=False)
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest or None, not 'adapter-0'"):
        llm.generate(["the"], lora_request="adapter-0", use_tqdm=False)
    with pytest.raises(ValueError, match="2 values of lora_request for 1 prompts"):
        llm.generate(["the"], lora_request=[first, first], use_tqdm=False)
    for arguments, message in (
        (("", 1, "x"), "lora_name is empty"),
        (("x", 0, "x"), "lora_int_id must be an integer of at least 1, not 0"),
        (("x", 1, ""), "lora_path is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            LoRARequest(*arguments)
    with pytest.raises(TypeError, match="lora_int_id must be an integer"):
        LoRARequest("x", "1", "x")
    with pytest.raises(ValueError, match="lora_request needs enable_lora=True"):
        LLM(str(model), **OPTIONS).generate(["the"], lora_request=first, use_tqdm=False)
    for options, message in (
        ({"max_loras": 2}, "max_loras=2 needs enable_lora"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras must be an integer of at least 1"),
        ({"enable_lora": True, "max_lora_rank": 1000}, "max_lora_rank must be an integer from 1 to 512, not 1000"),
        ({"enable_lora": True, "tensor_parallel_size": 2}, "enable_lora and tensor_parallel_size=2"),
        ({"enable_lora": True, "pipeline_parallel_size": 2}, "enable_lora and pipeline_parallel_size=2"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**options)


def test_files_that_vanish_after_the_check(llm, model, adapter, adapters):
    """Their requests end with an error, and no others."""
    gone = LoRARequest("gone", 60, str(adapter))
    llm.engine.input_processor.make_request("checked", "the", None, lora_request=gone)
    shutil.rmtree(adapter)
    outputs = llm.generate([[5, 6], [7, 8], [9]], GREEDY, lora_request=[gone, adapters[0], None], use_tqdm=False)
    assert str(adapter) in outputs[0].error
    assert "could not be loaded" in outputs[0].error
    assert "no such directory" in outputs[0].error
    assert [output.error for output in outputs[1:]] == [None, None]
    check_against(with_peft(model, adapters[0]), outputs[1])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_adapter_that_is_back_after_a_failed_load_is_loaded_again(model, adapter, adapters, async_scheduling):
    """Nothing of the failure stays: not the slot, and no blocks in the prefix cache."""
    options = {"max_loras": 1, "max_lora_rank": 8, "enable_lora": True, "async_scheduling": async_scheduling}
    llm = LLM(str(model), **OPTIONS, **options)
    request, prompt = LoRARequest("it", 70, str(adapter)), list(range(5, 45))

    def run(lora_request):
        return llm.generate([prompt], GREEDY, lora_request=lora_request, use_tqdm=False)[0]

    expected = run(request)
    run(adapters[0])  # takes the only slot
    llm.reset_prefix_cache()
    weights = adapter / "adapter_model.safetensors"
    weights.rename(adapter / "away")
    assert "has no adapter_model.safetensors" in run(request).error
    (adapter / "away").rename(weights)
    again = run(request)
    assert again.error is None
    assert answers([again]) == answers([expected])
    assert again.num_cached_tokens == 0


def test_a_file_that_is_cut_while_it_is_read_is_an_error(llm, adapter, monkeypatch):
    """With a file that is mapped into memory, it would be SIGBUS."""
    weights, request = adapter / "adapter_model.safetensors", LoRARequest("cut", 71, str(adapter))
    read, cuts = adapter_weights.stored_bytes, []

    def cutting(content, file):
        stored = read(content, file)
        os.truncate(file, 4096)
        cuts.append(file)
        return stored

    assert weights.stat().st_size > 2 * 4096
    monkeypatch.setattr(adapter_weights, "stored_bytes", cutting)
    output = llm.generate(["the"], GREEDY, lora_request=request, use_tqdm=False)[0]
    assert cuts == [weights]
    assert "has changed while it was read" in output.error


def test_a_path_of_a_user_that_does_not_exist(llm):
    with pytest.raises(ValueError, match="lora_path='~nosuchuser/x'"):
        llm.generate(["the"], GREEDY, lora_request=LoRARequest("bad", 98, "~nosuchuser/x"), use_tqdm=False)
    for path, message in (("~nosuchuser/x", "lora_path='~nosuchuser/x'"), ("", "lora_path is empty")):
        with pytest.raises(ValueError, match=message):
            ServedAdapters().check(llm, "bad", path)


def test_a_configuration_with_all_defaults_of_peft(llm, adapter):
    from peft import LoraConfig

    weights = (adapter / "adapter_model.safetensors").read_bytes()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(MODULES), task_type="CAUSAL_LM")
    config.save_pretrained(str(adapter))
    change(adapter, field_of_a_later_version=None, another=False)
    assert (adapter / "adapter_model.safetensors").read_bytes() == weights
    request = LoRARequest("defaults", 72, str(adapter))
    assert llm.generate(["the"], GREEDY, lora_request=request, use_tqdm=False)[0].error is None
