"""A model that is divided among workers computes what the whole model computes."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from helpers import CPU, LONG, ForkedLink, finish, random_tokens, tiny_model
from on_a_cpu import graphs_for
from safetensors import safe_open
from safetensors.torch import save_file
from test_gguf import SMOLLM, model_for, write_gguf
from test_quantized_checkpoint import KINDS, write_quantized

from nanopage import EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.cpu.packed import PackedWeight, pack
from nanopage.distributed.division import divide, layers_of_stage
from nanopage.distributed.parallel import part_of
from nanopage.distributed.part import WHOLE, Part, keep_layers, sums
from nanopage.weights import loader
from nanopage.worker import worker
from nanopage.worker.eager import Eager

SIZES = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "head_dim": 8}
FAMILIES = {
    "llama": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6}),
    "llama, biases": (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, tied": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mistral, window": ("mistral", {"num_attention_heads": 6, "num_key_value_heads": 1, "sliding_window": 7}),
    "qwen2": ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen3, tied": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_attention_heads": 6, "num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "gemma3, tied": (
        "gemma3_text",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
DIVISIONS = [(2, 1), (3, 1), (1, 3), (2, 2), (6, 1), (1, 2)]  # tensor and pipeline parallelism
# Each division of each number of KV heads. All of each family with NANOPAGE_LONG_TESTS=1.
DIVIDED = {
    "llama": [(2, 1)],
    "llama, biases": [(3, 1)],
    "llama, tied": [(2, 2), (3, 1)],
    "mistral, window": [(3, 1), (1, 3)],
    "qwen2": [(2, 1)],
    "qwen3, tied": [(3, 1)],
    "smollm3": [(1, 3)],
    "gemma3, tied": [(2, 2)],
}
EXPERTS = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=2)
pytestmark = pytest.mark.usefixtures("one_thread", "forked")


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr("nanopage.distributed.process_executor.ProcessLink", ForkedLink)


def answers(model, **options):
    """Tokens and log-probabilities of some requests together."""
    defaults = {"dtype": "float64", "device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 40}
    engine = build_engine(EngineConfig(**defaults | {"model": str(model), "enforce_eager": True} | options))
    try:
        for i, prompt in enumerate(random_tokens((3, 17, 9, 1))):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, PARAMS)
        outputs = finish(engine)
    finally:
        engine.shutdown()
    assert not any(output.error for output in outputs.values())
    tokens = [outputs[key].outputs[0].token_ids for key in sorted(outputs)]
    tables = [
        table
        for key in sorted(outputs)
        for table in (*outputs[key].outputs[0].logprobs, *outputs[key].prompt_logprobs[1:])
    ]
    return tokens, [{token: entry.logprob for token, entry in table.items()} for table in tables]


def assert_same(some, others, tolerance=1e-9):
    assert some[0] == others[0]
    for mine, theirs in zip(some[1], others[1], strict=True):
        assert mine.keys() == theirs.keys()
        for token in mine:
            assert mine[token] == pytest.approx(theirs[token], abs=tolerance)


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    name, config = FAMILIES[request.param]
    model = tiny_model(tmp_path_factory.mktemp("family"), name, **SIZES | config)
    return model, answers(model)


@pytest.mark.parametrize(
    ("family", "tp_size", "pp_size"),
    [(family, *sizes) for family in FAMILIES for sizes in (DIVISIONS if LONG else DIVIDED[family])],
    indirect=["family"],
)
def test_a_divided_model_gives_the_same_answers(family, tp_size, pp_size):
    """With one KV head for each worker, several, or one for several workers; with stages of one layer and of two."""
    model, expected = family
    heads = loader.read_config(model).num_kv_heads
    options = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
    if heads % tp_size and tp_size % heads:
        with pytest.raises(ValueError, match=f"tensor_parallel_size={tp_size} .* num_key_value_heads={heads}"):
            answers(model, **options)
        return
    assert_same(answers(model, **options), expected)


def on_static_buffers(setup, wings, *made):
    """What `list_ways` returns on a GPU for a worker that shares layers, but without capturing."""
    made = made[:3]
    ways = graphs_for(*made), Eager(*made)
    return [wings.wrap(way) for way in ways], "on static buffers", None


@pytest.mark.parametrize("family", FAMILIES if LONG else ["mistral, window", "gemma3, tied"], indirect=True)
def test_decodes_on_static_buffers_exchange_within_the_step(family, monkeypatch):
    """As in the CUDA graphs of a divided model, every worker runs the whole step, head and sampling included, and
    takes the tokens from the first one."""
    model, expected = family
    with monkeypatch.context() as patched:
        patched.setattr(worker, "list_ways", on_static_buffers)
        tp_size = {1: 2, 2: 6}.get(loader.read_config(model).num_kv_heads, 3)  # with 1 and 2, workers share KV heads
        assert_same(answers(model, tensor_parallel_size=tp_size), expected)


UNDIVIDED = ["phi3", "lfm2", "qwen3_next", *(["olmo2", "olmo3", "mamba2", "granitemoehybrid"] if LONG else [])]


@pytest.mark.parametrize("family", UNDIVIDED)
def test_a_family_that_cannot_be_divided_has_stages_and_refuses_the_rest(tmp_path, family):
    model = tiny_model(tmp_path, family, num_hidden_layers=2)
    assert_same(answers(model, pipeline_parallel_size=2), answers(model))
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2 does not work with \w+ForCausalLM: "):
        answers(model, tensor_parallel_size=2)


COLUMNS = {"tensor_parallel_size": 2}
WHOLE_EXPERTS = {"tensor_parallel_size": 3, "enable_expert_parallel": True}
STAGES = COLUMNS | {"pipeline_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("name", "config", "divisions"),
    [
        ("mixtral", {"num_local_experts": 6}, [COLUMNS]),
        ("gpt_oss", {"num_local_experts": 6, "intermediate_size": 18}, [STAGES]),
        ("qwen2_moe", {"shared_expert_intermediate_size": 30, "moe_intermediate_size": 12}, [COLUMNS]),
        ("qwen3_moe", {"moe_intermediate_size": 12, "mlp_only_layers": [1]}, [WHOLE_EXPERTS]),
        ("deepseek_v3", {"moe_intermediate_size": 12, "n_routed_experts": 12}, [STAGES]),
    ],
    ids=["mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "deepseek_v3"],
)
def test_experts_may_be_divided(tmp_path, name, config, divisions):
    """Their columns, or, with enable_expert_parallel, whole experts; also in stages. Each worker has the latent vector
    of a token, and some of the heads that are made of it."""
    model = tiny_model(tmp_path, name, **SIZES | EXPERTS | config)
    expected = answers(model)
    for options in [COLUMNS, WHOLE_EXPERTS, STAGES] if LONG else divisions:
        assert_same(answers(model, **options), expected)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"moe_intermediate_size": 13}, {}, "does not divide intermediate_size=13 of each expert: enable_expert_para"),
        ({"num_experts": 7}, {"enable_expert_parallel": True}, "with enable_expert_parallel does not divide num_exp"),
        ({"shared_expert_intermediate_size": 31}, {}, "does not divide shared_expert_intermediate_size=31"),
        (None, {"enable_expert_parallel": True}, "enable_expert_parallel=True, but .* has no experts"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_by_name(tmp_path, config, options, message):
    family = ("llama", {}) if config is None else ("qwen2_moe", config)
    model = tiny_model(tmp_path, family[0], **SIZES | EXPERTS | family[1])
    with pytest.raises(ValueError, match=message):
        answers(model, tensor_parallel_size=2, **options)


def test_a_mixture_is_added_up_once(tmp_path):
    model = tiny_model(tmp_path, "qwen2_moe", **SIZES | EXPERTS, decoder_sparse_step=2)
    config = loader.read_config(model)
    for part in (Part(1, 2), Part(1, 2, 0, 1, True)):
        names = [place for place, _ in sums(part.model(config), config)]
        attention = [f"layers.{i}.self_attn.o_proj" for i in range(3)]
        mlps = ["layers.0.mlp.down_proj", "layers.1.mlp", "layers.2.mlp.down_proj"]
        assert names == [name for pair in zip(attention, mlps, strict=True) for name in pair]
    assert not sums(Part(0, 1, 1, 2).model(config), config)


@pytest.mark.parametrize("seed", [0, 1] if LONG else [0])
def test_forks_and_swaps_reach_every_worker(tmp_path, seed):
    model = tiny_model(tmp_path, **SIZES, num_attention_heads=6, num_key_value_heads=3)

    def run(**options):
        engine = build_engine(
            EngineConfig(
                model=str(model),
                dtype="float64",
                device="cpu",
                max_model_len=48,
                num_gpu_blocks_override=6,
                preemption_mode="swap",
                swap_space=0.001,
                enforce_eager=True,
                **options,
            )
        )
        preempted = 0
        try:
            params = SamplingParams(n=2, temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True)
            for i, prompt in enumerate(random_tokens((5, 9, 3))):
                engine.add_request(str(i), {"prompt_token_ids": prompt}, replace(params, frequency_penalty=i / 2))
            outputs = {}
            while engine.has_unfinished_requests():
                outputs |= {output.request_id: output for output in engine.step()}
                preempted += engine.last_step.swapped_out
        finally:
            engine.shutdown()
        assert preempted
        return [[completion.token_ids for completion in outputs[key].outputs] for key in sorted(outputs)]

    expected = run()
    assert run(tensor_parallel_size=3) == expected
    assert run(pipeline_parallel_size=2) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4 does not divide num_attention_heads=6"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size=5 does not divide num_attention_heads=6"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size=4 is more than the model's 3 layers"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused_by_name(tmp_path, options, message):
    model = tiny_model(tmp_path, **SIZES, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(ValueError, match=message):
        answers(model, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 37}, "tensor_parallel_size=2 does not divide intermediate_size=37"),
        ({"vocab_size": 301}, "tensor_parallel_size=2 does not divide vocab_size=301"),
        ({"num_heads": 9}, "tensor_parallel_size=2 does not divide num_attention_heads=9"),
    ],
)
def test_each_size_is_named(model, changes, message):
    config = loader.read_config(model)
    with pytest.raises(ValueError, match=message):
        divide(replace(config, **changes), 2)


def test_stages_cover_all_layers_once(model):
    config = replace(loader.read_config(model), num_layers=7)
    for pp_size in range(1, 8):
        stages = [layers_of_stage(config, rank, pp_size) for rank in range(pp_size)]
        assert [layer for stage in stages for layer in stage] == list(range(7))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_a_stage_knows_which_of_its_layers_have_experts(tmp_path):
    config = loader.read_config(tiny_model(tmp_path, "qwen2_moe", num_hidden_layers=3, mlp_only_layers=[2]))
    stages = [Part(pp_rank=rank, pp_size=2).config(config) for rank in range(2)]
    assert [stage.experts.layers for stage in stages] == [(True, True), (False,)]


def test_ranks_are_numbered_stage_by_stage():
    config = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert part_of(config, 0) == Part(0, 2, 0, 3)
    assert part_of(config, 3) == Part(1, 2, 1, 3)
    assert [rank for rank in range(6) if part_of(config, rank).samples] == [4]


def load(model, part):
    return loader.load_model(model, loader.read_config(model), torch.float32, CPU, loader.Loading(part=part))


def test_slices_of_all_workers_make_the_whole_weights(tmp_path):
    model = tiny_model(tmp_path, **SIZES, num_attention_heads=6, num_key_value_heads=3, attention_bias=True)
    whole, parts = load(model, WHOLE), [load(model, Part(rank, 3)) for rank in range(3)]
    layer, mine = whole.layers[1], [part.layers[1] for part in parts]
    assert torch.equal(
        layer.mlp.down_proj.weight.matrix, torch.cat([own.mlp.down_proj.weight.matrix for own in mine], 1)
    )
    assert torch.equal(
        layer.self_attn.o_proj.weight.matrix, torch.cat([own.self_attn.o_proj.weight.matrix for own in mine], 1)
    )
    assert torch.equal(whole.lm_head.weight.matrix, torch.cat([part.lm_head.weight.matrix for part in parts]))
    q, k, v = layer.self_attn.qkv_proj.weight.matrix.split([48, 24, 24])
    for rank, own in enumerate(mine):
        expected = torch.cat([q[16 * rank :][:16], k[8 * rank :][:8], v[8 * rank :][:8]])
        assert torch.equal(own.self_attn.qkv_proj.weight.matrix, expected)
    assert [own.self_attn.o_proj.bias is None for own in mine] == [False, True, True]  # it is added once


def test_the_layers_that_are_added_up_follow_from_their_shapes(model):
    config = loader.read_config(model)
    names = {place.split(".", 2)[2] for place, _ in sums(Part(0, 2).model(config), config)}
    assert names == {"self_attn.o_proj", "mlp.down_proj"}
    assert not sums(Part(0, 1, 1, 2).model(config), config)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_only_what_it_computes(tmp_path, tied):
    model = tiny_model(
        tmp_path, **SIZES, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=tied, vocab_size=300
    )
    sizes = []
    for rank in range(3):
        part = load(model, Part(pp_rank=rank, pp_size=3))
        keep_layers(part)
        assert len(part.layers) == 1
        sizes.append(sum(parameter.numel() for parameter in part.parameters()))
    layer, vocabulary = sizes[1], 300 * 24
    assert sizes == [layer + vocabulary, layer, layer + vocabulary + 24]


def test_a_worker_reads_only_its_slices(tmp_path, monkeypatch):
    model = tiny_model(tmp_path, **SIZES, num_attention_heads=6, num_key_value_heads=3)
    read, read_tensors = 0, loader.read_tensors

    def counting(*args):
        nonlocal read
        for name, start, rows in read_tensors(*args):
            read += rows.numel()
            yield name, start, rows

    monkeypatch.setattr(loader, "read_tensors", counting)
    for part in (WHOLE, Part(1, 3), Part(0, 1, 1, 3), Part(2, 3, 2, 3)):
        read = 0
        built = load(model, part)
        shared = sum(parameter.numel() for parameter in built.parameters())
        assert read == shared


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}], ids=str)
def test_int8_weights_are_divided_as_well(tmp_path, options):
    """Each worker rounds its slices, so a divided row has several scales. That rounds no worse."""
    sizes = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
    model = tiny_model(tmp_path, **sizes, num_attention_heads=3, num_key_value_heads=3)

    def prompt_logprobs(**options):
        return answers(model, dtype="float32", **options)[1]

    exact, alone = prompt_logprobs(), prompt_logprobs(quantization="int8")
    divided = prompt_logprobs(quantization="int8", **options)

    def error(tables):
        """Of the log-probabilities of the first prompt's tokens, of which every run has the same."""
        of_prompt = list(zip(tables, exact, strict=True))[10:12]
        return max(abs(mine[token] - theirs[token]) for mine, theirs in of_prompt for token in mine.keys() & theirs)

    assert 0 < error(divided) < 3 * error(alone)


def test_dummy_weights_are_those_of_the_whole_model(tmp_path):
    model = tiny_model(tmp_path, **SIZES, num_attention_heads=6, num_key_value_heads=3)
    expected = answers(model, load_format="dummy")
    assert_same(answers(model, load_format="dummy", tensor_parallel_size=3), expected)
    assert_same(answers(model, load_format="dummy", pipeline_parallel_size=3), expected)


def test_kv_scales_reach_the_stage_that_has_the_layer(tmp_path):
    model = tiny_model(tmp_path, **SIZES, num_attention_heads=6, num_key_value_heads=3)
    file = model / "model.safetensors"
    with safe_open(file, framework="pt") as content:
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    tensors |= {f"model.layers.{i}.self_attn.k_scale": torch.tensor(0.5 + i) for i in range(3)}
    save_file(tensors, file, metadata={"format": "pt"})
    expected = answers(model, kv_cache_dtype="fp8")
    assert_same(answers(model, kv_cache_dtype="fp8", pipeline_parallel_size=3), expected)
    assert_same(answers(model, kv_cache_dtype="fp8", tensor_parallel_size=3), expected)


def test_the_first_stage_keeps_the_memory_of_a_packed_head_that_it_shares(tmp_path):
    """In float32, weights are packed by oneDNN, and the embedding reads the head's memory."""
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}
    model = tiny_model(tmp_path, **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    expected = answers(model, dtype="float32")
    assert_same(answers(model, dtype="float32", pipeline_parallel_size=2), expected, 1e-4)
    whole = load(model, WHOLE)
    pack(whole)
    assert isinstance(whole.embed_tokens.weight, PackedWeight)
    embedding, weight, whole.lm_head = whole.embed_tokens, load(model, WHOLE).lm_head.weight.matrix, None
    del whole
    overwritten = [torch.full((320, 64), 7.0) for _ in range(50)]
    assert torch.equal(embedding(torch.arange(320)), weight)
    del overwritten


def test_as_many_batches_are_in_flight_as_there_are_stages(tmp_path):
    model = tiny_model(tmp_path, **SIZES, num_attention_heads=6, num_key_value_heads=3)
    engine = build_engine(
        EngineConfig(model=str(model), device="cpu", max_model_len=64, num_gpu_blocks_override=40,
                     pipeline_parallel_size=3, enforce_eager=True)
    )  # fmt: skip
    batches, in_flight = [], []
    submit = engine.executor.submit

    def counted(batch):
        batches.append(set(batch.rows))
        in_flight.append(len(engine.executor._awaited))
        submit(batch)

    engine.executor.submit = counted
    try:
        for i, prompt in enumerate(random_tokens([4] * 6)):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, PARAMS)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        engine.shutdown()
    assert max(in_flight) == 2  # before the third was submitted
    steady = batches[3:-3]
    assert all(len(batch) == 2 for batch in steady[1:])
    assert all(not first & second for first, second in pairwise(steady))


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_a_quantized_checkpoint_is_divided(tmp_path, option):
    """By tensor parallelism, its matrices become floats."""
    write_quantized(tmp_path, KINDS["awq"])
    run = partial(answers, tmp_path, dtype="float32")
    assert_same(run(**{option: 2}), run(), 1e-4)


def test_a_quantized_gguf_file_keeps_its_integers_in_stages(tmp_path, monkeypatch):
    """Divided by tensor parallelism, its matrices become floats."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", model_for(SMOLLM), "llama", SMOLLM, types={"": Kind.Q8_0})
    floats = answers(file, dtype="float64")
    assert_same(answers(file, dtype="float64", pipeline_parallel_size=2), floats)
    assert_same(answers(file, dtype="float64", tensor_parallel_size=2), floats)
