"""Mixtures of experts: routing, any balance of the experts, fused and separate weights, quantized ones, and what is
refused. test_models.py compares whole models with transformers."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, Paged, assert_all_close, random_tokens, reference_logits, tiny_hf_model, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nanopage import EngineConfig
from nanopage.checks.fields import MAX_SIZES, Fields
from nanopage.config.model import ExpertsConfig
from nanopage.cpu.packed import PackedWeight
from nanopage.cpu.tile_linear import round_activations
from nanopage.cpu.tiled import TiledWeight, tile
from nanopage.cpu.tiled_experts import TiledExperts, can_join
from nanopage.distributed.part import Part
from nanopage.experts.config import read_grouped_experts
from nanopage.experts.moe import Experts, Gate, GroupedExperts, MixtureOfExperts, route
from nanopage.files import safetensors_checkpoint
from nanopage.layers.linear import Linear
from nanopage.layers.mlp import MLP
from nanopage.layers.weight import Floats
from nanopage.reading.config import config_from_dict
from nanopage.startup.options import refused
from nanopage.startup.worker import build_worker
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
ALL = pytest.mark.parametrize("family", FAMILIES)


def everything_at_once(paged, lengths):
    paged.step({index: length - 1 for index, length in enumerate(lengths)})
    paged.step(dict.fromkeys(range(len(lengths)), 1))


def mixtures_of(model):
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


@pytest.mark.parametrize("normalize", [False, True])
def test_routing_is_that_of_transformers(normalize):
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

    config = SimpleNamespace(num_experts_per_tok=3, num_experts=7, norm_topk_prob=normalize, hidden_size=7)
    router = Qwen2MoeTopKRouter(config)
    router.weight.data = torch.eye(7)
    logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(0)) * 3
    _, weights, experts = router(logits)
    found, ours = route(logits, 3, normalize)
    assert torch.equal(found, experts) and torch.equal(ours, weights)
    assert route(logits.to(torch.bfloat16), 3, normalize)[1].dtype == torch.float32


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_so_is_routing_in_groups_with_a_bias(corrected, normalize, groups):
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"num_experts": 12, "num_local_experts": 12, "num_experts_per_tok": 3, "hidden_size": 12}
    named = {"norm_topk_prob": normalize, "n_group": groups[0], "topk_group": groups[1], "routed_scaling_factor": 2.5}
    config = SimpleNamespace(**sizes, **named, topk_method="group_limited_greedy" if groups[0] > 1 else "greedy")
    router = (DeepseekV3TopkRouter if corrected else DeepseekV2TopkRouter)(config)
    router.weight.data = torch.eye(12)
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(50, 12, generator=generator) * 3, torch.randn(12, generator=generator)
    router.e_score_correction_bias = bias
    _, weights, experts = router(logits)
    ours = route(logits, 3, normalize and corrected, bias.double() if corrected else None, groups, 2.5)
    dense = [torch.zeros(50, 12).scatter(1, chosen, weight) for chosen, weight in (ours, (experts, weights))]
    assert torch.equal(*dense)
    assert (route(logits, 3, False, bias, groups)[0] != route(logits, 3, False)[0]).any()


GROUPED = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "n_shared_experts": 2, "norm_topk_prob": True, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


def test_experts_in_groups_are_read():
    read = read_grouped_experts(Fields(GROUPED, "config.json"), corrected=True)
    assert read == ExpertsConfig(
        8, 3, 40, 80, True, (False, True, True), shared_gate=False, corrected=True, groups=(4, 2), scaling=2.5
    )
    assert read_grouped_experts(Fields(GROUPED | {"n_group": 0}, ""), False, in_groups=False).groups == (1, 1)
    assert all(read_grouped_experts(Fields(GROUPED | {"first_k_dense_replace": 0}, ""), True).layers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, most + 1) for name, most in MAX_SIZES.items() if name in GROUPED),
        *[("n_group", 0), ("n_group", 3), ("n_group", 8), ("n_group", 1), ("topk_group", 5), ("topk_group", 1)],
        *[("routed_scaling_factor", 0), ("first_k_dense_replace", -1), ("norm_topk_prob", 1)],
    ],
)
def test_what_experts_in_groups_cannot_be_is_named(name, value):
    field = "topk_group" if (name, value) == ("n_group", 1) else name
    with pytest.raises(ValueError, match=rf"^config.json: {field} "):
        read_grouped_experts(Fields(GROUPED | {name: value}, "config.json"), corrected=True)


def mixture(num_experts=5, num_chosen=2, hidden_size=16):
    config = ExpertsConfig(num_experts, num_chosen, 24, 0, True, (True,))
    with torch.device("meta"):
        made = MixtureOfExperts(hidden_size, config)
    made.to_empty(device="cpu").requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    return made


def test_only_the_weights_of_chosen_experts_are_read():
    """Those of other experts may be anything, here NaN."""
    made, x = mixture(), torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    expected = made(x)
    chosen, _ = made.gate(x)
    for number, expert in enumerate(made.experts):
        if number not in chosen[0]:
            for parameter in expert.parameters():
                parameter.fill_(torch.nan)
    assert torch.equal(made(x), expected) and expected.isfinite().all()


@pytest.mark.parametrize("choice", ["one", "two", "all"])
def test_any_balance_of_experts(choice):
    """All tokens go to one expert, the other ones have none, and each token's output is that of the token alone."""
    made = mixture(num_chosen=1 if choice == "one" else 2).double()  # float32 rounds otherwise for more rows
    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if choice != "all":
        made.gate.weight.zero_()
        x[:, 0] = 5
        made.gate.weight[3, 0], made.gate.weight[1, 0] = 9, 8
    y = made(x)
    chosen, weights = made.gate(x)
    assert len(chosen.unique()) == {"one": 1, "two": 2, "all": 5}[choice]
    for token in range(30):
        alone = sum(w * made.experts[e](x[token, None]) for e, w in zip(chosen[token], weights[token], strict=True))
        torch.testing.assert_close(y[token, None], alone)
        torch.testing.assert_close(made(x[token, None]), alone)


def save(directory, family, fused, **options):
    """A model as transformers saves it, or with its fused tensors. Returns transformers' model."""
    hf_model = tiny_hf_model(family, **options)
    hf_model.save_pretrained(directory, save_original_format=not fused)
    with safe_open(directory / "model.safetensors", framework="pt") as content:
        names = list(content.keys())
    assert any(name.endswith("experts.gate_up_proj") for name in names) == fused
    return hf_model


@ALL
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_experts_of_a_gpu_compute_the_same(tmp_path, family, fused):
    """From both kinds of checkpoints."""
    hf_model, sequences = save(tmp_path, family, fused), random_tokens([2, 9, 33])
    expected = reference_logits(hf_model, sequences)
    for group in (False, True):
        paged = Paged(tmp_path, sequences, group=group)
        kinds = {type(module.experts) for module in mixtures_of(paged.model)}
        assert kinds == {GroupedExperts if group else Experts}
        assert_all_close(paged.run(everything_at_once), expected)


def test_experts_with_biases(tmp_path):
    """Of GPT-OSS: fused for a GPU, of a pipeline stage, in tiles, and with random weights."""
    hf_model, sequences = save(tmp_path, "gpt_oss", True), random_tokens([2, 9, 33])
    expected, config = reference_logits(hf_model, sequences), loader.read_config(tmp_path)
    paged = Paged(tmp_path, sequences, group=True)
    assert {type(module.experts) for module in mixtures_of(paged.model)} == {GroupedExperts}
    assert_all_close(paged.run(everything_at_once), expected)
    whole = loader.slots(paged.model)  # test_parallel.py divides layers
    for how in (loader.Loading(part=Part(0, 1, 1, 2)), loader.Loading(part=Part(0, 1, 1, 2), group=True)):
        stage = loader.slots(loader.load_model(tmp_path, config, torch.float32, CPU, how))
        assert len(stage) > 10 and all(torch.equal(stage[name], whole[name]) for name in stage)
    tiled, exact = torch.cat(Paged(tmp_path, sequences, tiles="int8").run(everything_at_once)), torch.cat(expected)
    assert (tiled - exact).abs().median() < 0.1 * exact.std()
    separate, fused = (
        loader.slots(loader.load_model(tmp_path, config, torch.float32, CPU, loader.Loading("dummy", group=group)))
        for group in (False, True)
    )
    assert separate.keys() == fused.keys() and all(torch.equal(separate[name], fused[name]) for name in separate)


@ALL
@pytest.mark.parametrize("part", [Part(1, 2), Part(1, 2, 0, 1, True), Part(0, 2, 1, 2, True)], ids=str)
def test_parts_of_fused_tensors_are_those_of_separate_ones(tmp_path, family, part):
    for fused in (False, True):
        save(tmp_path / str(fused), family, fused)
    config = loader.read_config(tmp_path / "True")
    found = []
    for fused in (False, True):
        for group in (False, True):
            how = loader.Loading(part=part, group=group)
            model = loader.load_model(tmp_path / str(fused), config, torch.float32, CPU, how)
            found.append(loader.slots(model))
    for others in found[1:]:
        assert found[0].keys() == others.keys()
        assert all(torch.equal(found[0][name], others[name]) for name in others)
    numbers = {name.split(".experts.")[1].split(".")[0] for name in found[0] if ".experts." in name}
    each = config.experts.num_experts // 2
    mine = range(each * part.tp_rank, each * (part.tp_rank + 1))
    assert numbers == set(map(str, mine if part.expert_parallel else range(2 * each)))


@pytest.mark.parametrize(
    ("family", "name", "shape", "message"),
    [
        ("mixtral", "block_sparse_moe.experts.2.w3.weight", None, r"missing: {} \[96, 64\]"),
        ("mixtral", "block_sparse_moe.experts.0.w2.weight", (64, 95), r"mis-shaped: {} is \[64, 95\]"),
        ("mixtral", "block_sparse_moe.experts.4.w1.weight", (96, 64), r"unexpected: {} \[96, 64\]"),
        ("qwen3_moe", "mlp.experts.5.up_proj.weight", None, r"missing: {} \[40, 64\]"),
        ("qwen3_moe", "mlp.gate.weight", (5, 64), r"mis-shaped: {} is \[5, 64\], the model wants \[6, 64\]"),
        ("qwen2_moe", "mlp.shared_expert_gate.weight", None, r"missing: {} \[1, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, family, name, shape, message):
    save(tmp_path, family, False)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.1.{name}"
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message.format(name)) as error:
        loader.load_model(tmp_path, loader.read_config(tmp_path), torch.float32, CPU)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("down_proj", (5, 64, 40), r"missing: model.layers.0.mlp.experts.5.down_proj.weight"),
        ("gate_up_proj", (6, 80, 63), r"mis-shaped: model.layers.0.mlp.experts.0.gate_proj.weight is \[40, 63\]"),
        ("gate_up_proj", (6, 81, 64), r"unexpected: model.layers.0.mlp.experts.gate_up_proj \[6, 81, 64\]"),
        ("down_proj", (6, 64), r"unexpected: model.layers.0.mlp.experts.down_proj \[6, 64\]"),
    ],
)
def test_fused_tensors_that_do_not_fit_are_named(tmp_path, kind, shape, message):
    save(tmp_path, "qwen3_moe", True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.0.mlp.experts.{kind}"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        loader.load_model(tmp_path, loader.read_config(tmp_path), torch.float32, CPU)


def test_a_small_file_does_not_become_millions_of_matrices(tmp_path, monkeypatch):
    save(tmp_path, "qwen3_moe", True)
    monkeypatch.setattr(safetensors_checkpoint, "MAX_MATRICES", 30)
    with pytest.raises(ValueError, match=r"model.safetensors has more than 30 tensors, each expert's counted"):
        loader.load_model(tmp_path, loader.read_config(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ({"num_experts": 4096, "num_hidden_layers": 1000}, "num_experts 4,096 in 1,000 layers is more than 65,536"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_experts=6, got 7"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers must be a list of integers, got '0'"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers must be a list of integers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, got 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ({"moe_intermediate_size": 2**21}, "moe_intermediate_size must be at most 1,048,576"),
        ({"use_sliding_window": True, "layer_types": None}, "use_sliding_window true needs layer_types"),
    ],
)
def test_a_field_that_is_wrong_is_named(changes, message):
    config = tiny_hf_model("qwen2_moe").config.to_dict() | {"architectures": ["Qwen2MoeForCausalLM"]}
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        config_from_dict(config | changes)


def test_quantization_rounds_experts_but_not_the_router():
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    tiled, expected = mixture(hidden_size=64), mixture(hidden_size=64)
    tile(tiled, "int8")
    assert isinstance(tiled.gate, Gate)
    linears = [module for module in expected.modules() if isinstance(module, Linear)]
    assert len(linears) == 10
    for linear in linears:
        matrix = linear.weight.matrix
        step = matrix.abs().amax(1, keepdim=True) / 127
        matrix.copy_((matrix / step).round() * step)
        linear.register_forward_pre_hook(lambda _, inputs: round_activations(inputs[0]))
    assert not any(isinstance(module, Floats) for module in tiled.modules())
    torch.testing.assert_close(tiled(x), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_model_with_quantized_experts_answers(tmp_path, kind):
    model = tiny_model(tmp_path, "qwen2_moe")
    worker = make_worker(model, quantization=kind, enforce_eager=True)
    experts = [expert for made in mixtures_of(worker.model) for expert in [*made.experts, made.shared_expert]]
    assert len(experts) == 14
    assert all(isinstance(w, TiledWeight) for e in experts for w in (e.gate_up_proj.weight, e.down_proj.weight))


def test_weights_of_experts_are_packed_for_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("nanopage.weights.storage.tile_product", lambda _: None)
    model = tiny_model(tmp_path, "qwen3_moe")
    worker = make_worker(model, dtype="float32")
    assert all(isinstance(e.down_proj.weight, PackedWeight) for m in mixtures_of(worker.model) for e in m.experts)
    assert worker.way == "eagerly: the experts of this model are not compiled"


class PlainProducts:
    """The operators in plain torch, in place of compiled ones."""

    experts = staticmethod(torch.ops.nanopage.tile_experts)

    def __call__(self, *tensors):
        return torch.ops.nanopage.tile_linear(*tensors)


def experts_of(model, **options):
    """A worker as if there were compiled products, its mixtures, and those of a worker without them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanopage.weights.storage.tile_product", lambda _: None)
        expected = mixtures_of(make_worker(model, **options).model)
        patch.setattr("nanopage.weights.storage.tile_product", lambda _: PlainProducts())
        worker = make_worker(model, **options)
    return worker, mixtures_of(worker.model), expected


@ALL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_a_cpu_compute_the_same_in_tiles(tmp_path, family, dtype):
    """From a checkpoint in float32, and from one in bfloat16, whose tiles stay in bfloat16."""
    model = tiny_model(tmp_path, family, dtype=getattr(torch, dtype))
    worker, mixtures, expected = experts_of(model, dtype="float32")
    assert worker.way == "eagerly: NANOPAGE_COMPILE=never"
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for mixture, plain in zip(mixtures, expected, strict=True):
        assert isinstance(mixture.experts, TiledExperts) and mixture.experts.product is PlainProducts.experts
        assert mixture.experts.first.gate_up_proj.weight.tiles.dtype == getattr(torch, dtype)
        assert mixture.shared_expert is None or not isinstance(mixture.shared_expert.down_proj.weight, Floats)
        torch.testing.assert_close(mixture(x), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_experts_of_a_cpu_compute_the_same(tmp_path, kind):
    model = tiny_model(tmp_path, "qwen2_moe", moe_intermediate_size=64)
    _, mixtures, expected = experts_of(model, dtype="float32", quantization=kind)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for mixture, plain in zip(mixtures, expected, strict=True):
        assert mixture.experts.first.gate_up_proj.weight.scales.dim() == (4 if kind == "int4" else 2)
        torch.testing.assert_close(mixture(x), plain(x), rtol=1e-3, atol=1e-3)


def test_experts_of_some_layers_are_in_tiles_too(tmp_path):
    worker, mixtures, _ = experts_of(tiny_model(tmp_path, "qwen3_moe", mlp_only_layers=[1]))
    assert len(mixtures) == 1 and isinstance(mixtures[0].experts, TiledExperts)
    assert worker.way == "eagerly: NANOPAGE_COMPILE=never"


@pytest.mark.parametrize("change", ["another activation", "a bias", "another class"])
def test_experts_that_the_operator_does_not_know_are_left_as_they_are(change):
    made = mixture()
    assert can_join(made)
    if change == "another activation":
        made.experts[3].activation = torch.relu
    elif change == "a bias":
        made.experts[3].down_proj.bias = torch.nn.Parameter(torch.zeros(16))
    else:
        made.experts[3].__class__ = type("Expert", (MLP,), {"forward": lambda self, x: x})
    assert not can_join(made)


def test_experts_without_compiled_products_stay_apart(tmp_path):
    worker = make_worker(tiny_model(tmp_path, "mixtral"), enforce_eager=True)
    assert all(isinstance(mixture.experts, Experts) for mixture in mixtures_of(worker.model))


def make_worker(model, **options):
    config = EngineConfig(model=str(model), device="cpu", max_model_len=64, num_gpu_blocks_override=8, **options)
    return build_worker(config, loader.read_config(model), model)


def test_random_weights_need_no_files(tmp_path):
    model = tiny_model(tmp_path, "qwen2_moe")
    (model / "model.safetensors").unlink()
    make_worker(model, load_format="dummy", enforce_eager=True)
    separate, fused = (
        loader.slots(loader.load_model(model, loader.read_config(model), torch.float32, CPU, how))
        for how in (loader.Loading("dummy"), loader.Loading("dummy", group=True))
    )
    assert all(torch.equal(separate[name], fused[name]) for name in separate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, "quantization='fp8' works on a GPU only"),
        ({"quantization": "awq"}, "quantization='awq', but the weights of .* are not quantized"),
    ],
)
def test_what_does_not_work_with_experts_is_refused_by_name(tmp_path, options, message):
    model = tiny_model(tmp_path, "mixtral")
    with pytest.raises(ValueError, match=message):
        make_worker(model, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantization='int8' on a GPU does not quantize experts"),
        ({"quantization": "fp8"}, "quantization='fp8' on a GPU does not quantize experts"),
        ({"dtype": "float64"}, "dtype='float64' on a GPU does not work with experts"),
        ({"enable_lora": True}, "enable_lora on a GPU does not work with experts"),
    ],
)
def test_what_does_not_work_on_a_gpu_is_refused_by_name(tmp_path, options, message):
    """Before anything is loaded. Here without a GPU."""
    model, gpu = tiny_model(tmp_path, "qwen3_moe"), torch.device("cuda")
    dtype = getattr(torch, options.get("dtype", "float32"))
    (found,) = refused(EngineConfig(**options), loader.read_config(model), gpu, dtype, model)
    assert re.match(message, found)


def test_the_layer_after_the_last_one_of_glm_is_left_out(tmp_path):
    tiny_hf_model("glm4_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, config = load_file(file), loader.read_config(tmp_path)
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}, file)
    assert len(loader.load_model(tmp_path, config, torch.float32, CPU).layers) == 2
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.3\.eh_proj"):
        loader.load_model(tmp_path, config, torch.float32, CPU)
