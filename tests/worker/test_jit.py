from functools import partial

import numpy as np
import pytest
import torch
from helpers import CPU, LONG, Paged, assert_all_close, random_tokens, reference_logits, tiny_hf_model
from on_a_cpu import compile_pieces, make_sample_all

from benchmarks.compile_parts import run_module
from nanopage.sampling.sampler import Sampler
from nanopage.state.sampling_table import SamplingTable
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch, NewSequence, SamplingSettings
from nanopage.weights import loader
from nanopage.worker import jit

LENGTHS = [11, 5, 1, 23]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", *(["qwen2", "qwen3"] if LONG else [])])
def test_nothing_is_compiled_after_the_warm_up_and_logits_are_the_same(family, tmp_path, compiled_graphs):
    """By Dynamo and AOTAutograd; what Inductor would make of it is left out here."""
    hf_model = tiny_hf_model(family, num_hidden_layers=3)
    hf_model.save_pretrained(tmp_path)
    sequences = random_tokens(LENGTHS)
    # float64: weights stay as they are, as on a GPU, and are not packed for a CPU.
    paged = Paged(tmp_path, sequences, torch.float64)
    paged.way.model = compile_pieces(paged.model, loader.read_config(tmp_path), torch.float64, CPU)
    assert len(compiled_graphs) == 8  # first, between, last and head; of many tokens and of one
    with torch.compiler.set_stance("fail_on_recompile"):
        while any(paged.done(i) < length for i, length in enumerate(LENGTHS)):
            left = {i: length - paged.done(i) for i, length in enumerate(LENGTHS) if paged.done(i) < length}
            most = 1 if len(left) == 1 else 7
            paged.step({i: min(n, most) for i, n in left.items()})
    assert len(compiled_graphs) == 8
    assert_all_close(paged.logits, reference_logits(hf_model.double(), sequences), 1e-5)


@pytest.mark.parametrize(
    ("family", "options", "num_graphs"),
    [("qwen3_moe", {"mlp_only_layers": [0]}, 10), *([("gpt_oss", {}, 8)] if LONG else [])],
)
def test_layers_with_experts_are_compiled_apart_from_those_without(
    tmp_path, compiled_graphs, family, options, num_graphs
):
    """In float32, which the kernel of experts multiplies."""
    hf_model = tiny_hf_model(family, num_hidden_layers=4, hidden_size=32, **options)
    hf_model.save_pretrained(tmp_path)
    paged = Paged(tmp_path, random_tokens([9, 4]), group=True)
    config = loader.read_config(tmp_path)
    paged.way.model = compile_pieces(paged.model, config, torch.float32, CPU)
    # With a plain layer, there are two kinds of between: after that layer, and after one with experts.
    assert len(compiled_graphs) == num_graphs
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in ({0: 8, 1: 4}, {0: 1}):
            paged.step(step)
    assert_all_close(paged.logits, reference_logits(hf_model, paged.sequences))


@pytest.mark.skipif(not LONG, reason="Inductor compiles for 10 s; runs with NANOPAGE_LONG_TESTS=1")
def test_inductor_does_not_cut_nested_regions_at_attention(tmp_path):
    """Why a decoder is compiled in pieces (docs/gpu.md). If this fails, torch can compile it whole."""
    found = run_module("tests.worker.nested_regions", str(tmp_path))
    assert found == [5, 1], "parts of four layers in one graph, and of nested regions"


def test_engines_of_any_number_and_size_do_not_share_what_is_compiled(tmp_path, compiled_graphs):
    """Two or three graphs of a function are an engine's. Torch keeps eight of a function, and here three."""
    with torch._dynamo.config.patch(recompile_limit=3):
        make_engines(tmp_path, 2)
    assert len(compiled_graphs) == 2 * (8 + 3)


def make_engines(tmp_path, count):
    for number in range(count):
        directory = tmp_path / str(number)
        tiny_hf_model(hidden_size=32 + 16 * number, intermediate_size=32).save_pretrained(directory)
        config = loader.read_config(directory)
        model = loader.load_model(directory, config, torch.float64, CPU)
        compile_pieces(model, config, torch.float64, CPU)
        sample_all = make_sample_all(wrap=jit.compile_afresh)
        sampling = SamplingTable(9, 128 * (1 + number), CPU)
        sampling.temperature.zero_()
        for size in (3, 2, 1):
            logits, ints = torch.randn(size, sampling.vocab_size), torch.zeros(size, dtype=torch.int64)
            tokens = sample_all(logits, ints, ints, sampling.temperature, sampling.seed, sampling.limits)
            assert torch.equal(tokens, logits.argmax(dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sampler_is_compiled_when_it_is_warmed_up_and_not_later(dtype, compiled_graphs):
    """For logits of the model's dtype and of float32, of many rows and of one, whatever the settings of the rows."""
    table = SequenceTable(60, 40, 16, 304, CPU)  # 304 = 16 * 19: argmax looks for a block first
    kinds = [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9, "presence_penalty": 0.5}, {"min_p": 0.1}]
    new = [NewSequence(row, [1, 2, 3], 3, row, SamplingSettings(**kinds[row % 5])) for row in range(59)]
    table.update(Batch(new=new))
    sample_all = make_sample_all(wrap=jit.compile_afresh)
    jit.warm_up_sampling(sample_all, table.sampling, dtype, CPU)
    assert len(compiled_graphs) == (2 if dtype == torch.float32 else 4)
    plain, compiled = Sampler(table), Sampler(table, sample_all)
    before = len(compiled_graphs)
    with torch.compiler.set_stance("fail_on_recompile"), torch.inference_mode():
        for rows in ([5], [3], [0, 1], [3, 4, 7], list(range(59)), [58]):
            logits = 3 * torch.randn(len(rows), 304).to(dtype)
            arguments = logits, np.array(rows), np.full(len(rows), 3)
            assert compiled(*arguments).result() == plain(*arguments).result()
    assert len(compiled_graphs) == before


def test_another_number_of_threads_compiles_nothing(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    double, threads = jit.compile_afresh(lambda x: 2 * x), torch.get_num_threads()
    assert double(torch.ones(3)).tolist() == [2, 2, 2]
    torch.set_num_threads(threads + 1)
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            assert double(torch.ones(3)).tolist() == [2, 2, 2]
    finally:
        torch.set_num_threads(threads)


def test_a_layer_takes_one_call_whose_guards_are_few(tmp_path, monkeypatch):
    """A step that is not captured evaluates them for each layer. Those of types, shapes and constants are left."""
    kept = []

    def filtering(function, fullgraph, options):
        def kept_of(guards):
            keep = options["guard_filter_fn"](guards)
            kept.append([guard.guard_type for guard, wanted in zip(guards, keep, strict=True) if wanted])
            return keep

        return compile(function, fullgraph=fullgraph, backend="eager", options={"guard_filter_fn": kept_of})

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", filtering)
    tiny_hf_model("qwen3").save_pretrained(tmp_path)
    config = loader.read_config(tmp_path)
    model = loader.load_model(tmp_path, config, torch.float64, CPU)
    compile_pieces(model, config, torch.float64, CPU)
    assert len(kept) == 8
    for types in kept:
        assert "TENSOR_MATCH" in types and "TYPE_MATCH" in types
        assert len(types) < 70 and not jit.UNCHECKED & set(types)
