"""quantized.py: weights of 4 and 8 bits in a model, as on a GPU; the kernel runs in Triton's interpreter."""

import gc
import weakref
from functools import partial

import pytest
import torch
from helpers import CPU, Paged, assert_all_close, random_tokens, tiny_model
from on_a_cpu import compile_pieces

from nanopage.layers.weight import Floats
from nanopage.quantization import quantized_weights
from nanopage.quantization.quantized import QuantizedWeight, quantize
from nanopage.quantization.quantized_weights import dequantize
from nanopage.weights import allocation, loader
from nanopage.worker import jit

LENGTHS = [5, 1, 9]
META = torch.device("meta")


@pytest.fixture
def directory(tmp_path):
    return tiny_model(tmp_path, "qwen2", hidden_size=96, num_attention_heads=6, tie_word_embeddings=True)


def load(directory, dtype=torch.float32, **options):
    return loader.load_model(directory, loader.read_config(directory), dtype, CPU, loader.Loading(**options))


def run(paged):
    while any(paged.done(i) < length for i, length in enumerate(LENGTHS)):
        left = {i: length - paged.done(i) for i, length in enumerate(LENGTHS) if paged.done(i) < length}
        most = 1 if len(left) == 1 else 6
        paged.step({i: min(n, most) for i, n in left.items()})
    return paged.logits


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_logits_are_those_of_the_dequantized_weights(directory, kind):
    paged = Paged(directory, random_tokens(LENGTHS))
    quantize(paged.model, kind, CPU)
    ours = run(paged)
    plain = Paged(directory, random_tokens(LENGTHS))
    for exact, rounded in zip(plain.model.modules(), paged.model.modules(), strict=True):
        if isinstance(rounded, QuantizedWeight):
            exact.matrix.copy_(dequantize(rounded))  # also that of the embedding that is tied to the head
    assert_all_close(ours, run(plain), 1e-4)


@pytest.mark.parametrize(
    ("kind", "in_layers", "of_head"), [("int8", torch.uint8, torch.uint8), ("fp8", torch.float8_e4m3fn, None)]
)
def test_a_byte_for_each_weight(directory, kind, in_layers, of_head):
    model = load(directory)
    quantize(model, kind, CPU)
    layer = model.layers[0]
    for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        assert linear.weight.packed.dtype == in_layers and linear.weight.scales.shape == (1, linear.out_features)
    assert not [module for module in model.layers.modules() if isinstance(module, Floats)]
    if of_head is None:  # as in vLLM
        assert isinstance(model.lm_head.weight, Floats) and model.lm_head.weight is model.embed_tokens.weight
    else:
        assert model.lm_head.weight.packed.dtype == of_head
        assert model.embed_tokens.weight is model.lm_head.weight


def test_int4_has_an_int8_head_and_int8_where_groups_do_not_fit(tmp_path):
    model = load(tiny_model(tmp_path, intermediate_size=80))
    quantize(model, "int4", CPU)
    layer = model.layers[0]
    bits = [linear.weight.bits for linear in (layer.self_attn.qkv_proj, layer.mlp.down_proj, model.lm_head)]
    assert bits == [4, 8, 8]
    assert isinstance(layer.mlp.gate_up_proj.weight, QuantizedWeight)
    assert isinstance(model.embed_tokens.weight, Floats)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.usefixtures("quick_collections")
def test_one_matrix_at_a_time_is_on_the_device(directory, kind, monkeypatch):
    """Nothing of the matrices before is left, but what they were rounded to. The meta device stands for the GPU."""
    moved, most = [], []

    def counted(rounding, weight):
        gc.collect()
        assert weight.device == META
        moved.append(weakref.ref(weight))
        most.append(sum(reference() is not None for reference in moved))
        return rounding(weight)

    for name in ("round_to_int8", "round_to_int4", "round_to_fp8"):
        monkeypatch.setattr(quantized_weights, name, partial(counted, getattr(quantized_weights, name)))
    model = load(directory)
    quantize(model, kind, META)
    assert len(most) == (8 if kind == "fp8" else 9) and max(most) == 1
    on_device = [buffer.device for name, buffer in model.named_buffers() if name.endswith(("packed", "scales"))]
    assert on_device and set(on_device) == {META}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_that_will_be_quantized_wait_on_the_cpu(directory, load_format, monkeypatch):
    monkeypatch.setattr(allocation, "_prepare_heap", lambda *_: pytest.fail("the model does not run on the CPU"))
    monkeypatch.setattr(loader, "dummy_tensors", lambda config, dtype, device: drawn_on(device, config, dtype))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    config = loader.read_config(directory)
    how = loader.Loading(load_format, on_host=True)
    model = loader.load_model(directory, config, torch.float32, torch.device("cuda"), how)
    assert {parameter.device for parameter in model.parameters()} == {CPU}


def drawn_on(device, config, dtype):
    assert device == torch.device("cuda")
    for name, slot in loader.slots(loader.meta_model(config)).items():
        yield name, torch.zeros(slot.shape, dtype=dtype)


@pytest.mark.interpreter
def test_layers_of_several_formats_are_compiled_at_start(tmp_path, compiled_graphs):
    """As in a .gguf file whose layers have integers of 4 or of 8 bits."""
    directory = tiny_model(tmp_path, num_hidden_layers=4)
    paged = Paged(directory, random_tokens(LENGTHS))
    plain = Paged(directory, random_tokens(LENGTHS))
    for model in (paged.model, plain.model):
        for layer, kind in zip(model.layers, ("int8", "int8", "int4", "int8"), strict=True):
            quantize(layer, kind, CPU)
    assert jit.formats_of(paged.model.layers[1]) != jit.formats_of(paged.model.layers[2])
    compiled = compile_pieces(paged.model, loader.read_config(directory), torch.float32, CPU)
    # The first and the last piece, those between layers of the formats int8, int8; int8, int4; and int4, int8, and the
    # head; of many tokens and of one.
    assert len(compiled_graphs) == 2 * (2 + 3 + 1)
    paged.model = paged.way.model = compiled
    with torch.compiler.set_stance("fail_on_recompile"):
        ours = run(paged)
    assert len(compiled_graphs) == 2 * (2 + 3 + 1)
    assert_all_close(ours, run(plain), 1e-5)
