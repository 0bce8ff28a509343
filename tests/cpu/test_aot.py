"""aot.py: compiled layers equal those they stand for, are made once, in the background, and leave nothing behind."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from draft_heads import TAPS, save_eagle
from filelock import FileLock
from gguf import GGMLQuantizationType as Kind
from helpers import (
    CPU,
    TEMPERATURE,
    Paged,
    assert_all_close,
    assert_close_but_for_rounding,
    finish,
    random_tokens,
    reference_logits,
    tiny_model,
)
from rich.progress import Progress
from safetensors.torch import load_file
from seeing import idefics_model, qwen_model
from test_gguf import SMOLLM, model_for, write_gguf
from test_lora import save_adapter
from test_models import LENGTHS, PLANS, packed
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from nanopage import EngineConfig, LLMEngine, LoRARequest, SamplingParams
from nanopage.__main__ import app
from nanopage.adapters.model import AdaptedDecoder
from nanopage.build import build_engine
from nanopage.config.model import ModelConfig
from nanopage.cpu import aot, aot_chain, aot_compile, aot_parts
from nanopage.cpu.compiled_files import LOCK, digest, find_file
from nanopage.cpu.packed import pack
from nanopage.cpu.packed_linear import can_pack
from nanopage.cpu.tiled import tile
from nanopage.cpu.tiled_experts import join_experts
from nanopage.files.private_files import cache_directory
from nanopage.models.meta import meta_model
from nanopage.recurrent.states import fit_block_size
from nanopage.standby import engine as standby
from nanopage.state.kv_cache import KVCache
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import NO_TOKEN, SamplingSettings
from nanopage.weights import allocation, loader
from nanopage.worker.eager import prepare
from nanopage.worker.model_runner import sampled_positions

ROOT = Path(__file__).parents[2]
LONG = os.environ.get("NANOPAGE_LONG_TESTS", "0") != "0"
# Layers that differ in their windows and ropes, with biases, norms in all places, a scale of scores, a soft cap of
# logits, and sizes that oneDNN keeps in tiles (the MLP's are not). The default model, which test_default_model.py
# compiles, has nothing of that.
MODEL = {
    "family": "gemma3_text",
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "attention_bias": True,
    "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 5.0,
    "head_dim": 16,
}
FILLING = 320  # a vocabulary that fills its tiles


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of compiled code of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield cache_directory()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), **MODEL, vocab_size=FILLING)


def build_model(config, dtype, device):
    """A model that is never filled."""
    model = meta_model(config)
    allocation.materialize(model, dtype, device)
    return model


def compiled_of(path, dtype=torch.float32, block_size=8, tiles=None, kv_dtype=None) -> aot.Compiled:
    """For a model that is never filled."""
    config = loader.read_config(path)
    block_size = fit_block_size(config, block_size, dtype, kv_dtype or dtype)
    model = build_model(config, dtype, CPU)
    join_experts(model, dtype)
    if tiles is not None:
        tile(model, "bfloat16")
    elif can_pack(dtype):
        pack(model)
    cache = KVCache(config, 4, block_size, kv_dtype or dtype, CPU)
    table = SequenceTable(2, 4 * block_size, block_size, config.vocab_size, CPU)
    return aot.Compiled(model, cache, table, config, dtype, tiles is not None)


def paged(model, compiled, dtype=torch.float32, tiles=None, kv_dtype=None) -> Paged:
    """With room for any nine of the sequences that tests run."""
    sequences = random_tokens([*LENGTHS, 40, 40, 40])

    def make_way(*made):
        return aot.Compiled(*made[:3], made[3], dtype, tiles is not None) if compiled else packed(*made)

    made = Paged(model, sequences, dtype, make_way, tiles, kv_dtype, join=compiled)
    if compiled:
        assert made.way.layers is not None
    return made


def assert_compiled_equals_eager(model, all_lengths, tiles=None, kv_dtype=None):
    compiled, eager = (paged(model, compiled, tiles=tiles, kv_dtype=kv_dtype) for compiled in (True, False))
    for lengths in all_lengths:
        sequences = random_tokens(lengths, seed=len(lengths))
        for plan in PLANS:
            compiled.restart(sequences)
            eager.restart(sequences)
            ours, theirs = compiled.run(plan), eager.run(plan)
            if tiles in ("int8", "int4", "blocks") or kv_dtype is not None:
                assert_close_but_for_rounding(torch.cat(ours), torch.cat(theirs))
            else:
                assert_all_close(ours, theirs)


def kinds_in(directory: Path) -> set[str]:
    return {file.name.split(".")[0] for file in directory.glob("*.so")}


@pytest.fixture(scope="module")
def directory(model, cache) -> Path:
    """Of the model's compiled code, which has been made."""
    compiled = compiled_of(model)
    compiled.compile()
    assert compiled.layers
    return compiled.directory


def test_the_compiling_process_reads_no_file_of_a_model_and_imports_none_of_the_current_directory(
    model, tmp_path, monkeypatch
):
    for name in ("nanopage", "torch", "filelock", "hashlib"):
        (tmp_path / f"{name}.py").write_text("open('was_run', 'w').close(); raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", str(ROOT)]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    compiled = compiled_of(tmp_path)
    pretend_to_be_made(compiled)
    (tmp_path / "config.json").unlink()
    monkeypatch.setattr(compiled, "ready", lambda: False)
    compiled.start()
    assert compiled._process.wait(300) == 0, compiled._log.read_text()
    assert not list(tmp_path.rglob("was_run")) and not compiled._log.exists()
    compiled.spec["config"] = "{}"
    assert compiled._spawn().wait(300) != 0
    assert "ValidationError" in compiled._log.read_text()


def pretend_to_be_made(compiled):
    """So that nothing is left to compile."""
    compiled.directory.mkdir(parents=True, mode=0o700)
    for file in compiled.files:
        (compiled.directory / file.replace(".so", ".0123456789abcdef.so")).touch()


IMPORTS = """
import sys
import nanopage.cpu.aot_compile
print(*sorted(name for name in sys.modules if name.startswith(("nanopage.", "torch._inductor", "triton"))))
"""


def test_the_compiling_process_imports_no_engine():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", IMPORTS], env=env, capture_output=True, text=True, timeout=120)
    imported = made.stdout.split()
    assert "nanopage.cpu.packed" in imported, made.stderr
    unneeded = ("engine", "text", "llm", "build", "sampling.sampler", "worker.worker", "worker.model_runner")
    unneeded = tuple(f"nanopage.{name}" for name in (*unneeded, "worker.jit", "worker.cuda_graphs"))
    # The compiler itself is imported when there is something to compile.
    assert not [name for name in imported if name.startswith((*unneeded, "torch._inductor", "triton"))]


def engine_of(model, **options) -> LLMEngine:
    defaults = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 32, "block_size": 8}
    return build_engine(EngineConfig(model=str(model), device="cpu", **defaults | options))


def compiled_in(engine) -> aot.Compiled | None:
    """The compiled code that the engine's steps run by, if they do."""
    compiled = engine.executor.worker.compiled
    return compiled if compiled is not None and compiled.layers else None


def run(engine) -> list[list[int]]:
    for i, prompt in enumerate(random_tokens([17, 1, 8])):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    outputs = finish(engine)
    return [outputs[str(i)].outputs[0].token_ids for i in range(3)]


ASK = """
import sys
from nanopage import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=128, num_gpu_blocks_override=32, block_size=8)
compiled = llm.engine.executor.worker.compiled
print(bool(compiled.layers))
llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)
if compiled._process is not None:
    print(compiled._process.pid, flush=True)
if len(sys.argv) > 2:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


def ask(model, cache, *arguments):
    command = [sys.executable, "-c", ASK, str(model), *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_a_program_with_one_question_leaves_a_process_that_compiles(model, tmp_path):
    done = ask(model, tmp_path)
    assert done.stdout.split()[0] == "False", done.stderr
    assert "still compiling" in done.stderr
    compiling = psutil.Process(int(done.stdout.split()[1]))
    assert compiling.is_running()
    os.killpg(compiling.pid, signal.SIGKILL)  # the next test waits for its like
    compiling.wait()


def test_a_program_that_is_killed_leaves_compiled_code_to_the_next_one(model, cache):
    """Before the other tests of compiled code, which use it as well."""
    first = ask(model, cache.parent, "kill")
    assert first.stdout.split()[0] == "False", first.stderr
    psutil.Process(int(first.stdout.split()[1])).wait(300)
    second = ask(model, cache.parent)
    assert second.stdout.split() == ["True"]
    assert "compil" not in second.stderr.replace("steps run with compiled layers", "")
    (directory,) = (cache / "compiled").iterdir()
    assert not list(directory.glob("log-*")) and not list(directory.glob(f"{aot_compile.SCRATCH}*"))


def test_compiled_layers_equal_the_eager_ones_at_any_size(model, directory):
    assert_compiled_equals_eager(model, (LENGTHS, [40], [2], [1], [3, 3], [17, 1], [1] * 9))


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_parts_of_a_step_that_threads_compute_equal_the_whole(model, directory, monkeypatch, num_threads):
    """Also with more threads than cores, in steps that are divided by rows and in those that are not."""
    monkeypatch.setattr(aot_chain, "PART_ROWS", 2)
    compiled, eager = (paged(model, compiled) for compiled in (True, False))
    way, spec = compiled.way, compiled.way.spec
    way.layers, way.spec = None, spec | {"threads": num_threads}
    way._load_if_ready()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for lengths in (LENGTHS, [40], [4], [num_threads * 2 + 1], [17, 1], [1] * 9):
            for plan in PLANS:
                for way in (compiled, eager):
                    way.restart(random_tokens(lengths, seed=len(lengths)))
                assert_all_close(compiled.run(plan), eager.run(plan))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not LONG, reason="compiles for 30 s; runs with NANOPAGE_LONG_TESTS=1")
@pytest.mark.parametrize(
    ("tiles", "kv_dtype"),
    [("int8", None), ("int4", None), ("bfloat16", None), ("bfloat16", torch.bfloat16), ("float16", torch.float16),
     ("blocks", None)],
)  # fmt: skip
def test_compiled_layers_with_weights_in_tiles_equal_the_eager_ones(tmp_path, cache, tiles, kv_dtype):
    # Sizes that fill their tiles and some that do not, a tied head that does not.
    options = {"hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True}
    if tiles == "blocks":
        types = {"q_proj": Kind.Q4_0, "self_attn": Kind.Q8_0, "": Kind.Q4_1}
        model = write_gguf(tmp_path / "tiny.gguf", model_for(SMOLLM, **options), "llama", SMOLLM, types=types)
    else:
        model = tiny_model(tmp_path, mlp_bias=True, **options)
    compiled = compiled_of(model, tiles=tiles, kv_dtype=kv_dtype)
    compiled.compile()
    kinds = {f"{part}-{kind}" for part in ("before", "after", "head") for kind in ("one", "many")}
    assert kinds_in(compiled.directory) == kinds | {"chain"}
    assert_compiled_equals_eager(model, (LENGTHS, [3, 3], [17, 1], [1] * 9), tiles, kv_dtype)
    if tiles != "int8":
        return
    engines = [engine_of(model, quantization="int8", enforce_eager=eager) for eager in (True, False)]
    assert compiled_in(engines[1]).head.of_many is not None
    assert [len(tokens) for tokens in run(engines[1])] == [len(tokens) for tokens in run(engines[0])]


@pytest.mark.skipif(not LONG, reason="compiles for 30 s; runs with NANOPAGE_LONG_TESTS=1")
@pytest.mark.parametrize(
    ("family", "tiles", "plain"),
    [("mixtral", None, None), ("qwen2_moe", None, None), ("qwen3_moe", None, [1]), ("qwen2_moe", "int8", [0, 2])],
)
def test_compiled_layers_with_experts_equal_the_eager_ones(tmp_path, cache, family, tiles, plain):
    """plain: layers without experts."""
    model = tiny_model(tmp_path, family, num_hidden_layers=3, **({} if plain is None else {"mlp_only_layers": plain}))
    compiled_of(model, tiles=tiles).compile()
    assert_compiled_equals_eager(model, (LENGTHS, [3, 3], [17, 1], [1] * 9), tiles)
    engine = engine_of(model, quantization=tiles)
    assert compiled_in(engine).layers is not None
    assert run(engine) == run(engine_of(model, quantization=tiles, enforce_eager=True))


@pytest.mark.parametrize("family", ["qwen3_next", *(["lfm2", "granitemoehybrid"] if LONG else [])])
def test_layers_with_a_state_can_be_exported_for_any_number_of_sequences(tmp_path, monkeypatch, family):
    """And, for sequences of any length, of any number of tokens."""
    exported = []

    def export(module, inputs, dims, file, options):
        program = torch.export.export(module, (*inputs,), dynamic_shapes=(*dims,), strict=False)
        shapes = [node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"]
        exported.append([size for shape in shapes[: len(inputs[0])] for size in shape[:1]])

    monkeypatch.setattr(aot_compile, "_export", export)
    compiled = compiled_of(tiny_model(tmp_path, family))
    for name in [name for name, (part, _) in compiled.files.items() if part == "mixer"]:
        aot_compile.make_part(compiled.spec, compiled.config, tmp_path, name)
    one, many, prompts = exported
    assert one == [1, 1, 1] and [len(many), len(prompts)] == [3, 10]
    assert all(isinstance(size, torch.SymInt) for size in many + prompts)


@pytest.mark.parametrize("save", [idefics_model, qwen_model])
def test_layers_of_a_model_that_sees_images_can_be_exported(save, tmp_path, monkeypatch):
    """The process that compiles has the config of the encoder as plain JSON, and needs no encoder."""
    exported = []
    monkeypatch.setattr(aot_compile, "_export", lambda *arguments: exported.append(arguments[3].name))
    save(tmp_path)
    compiled = compiled_of(tmp_path)
    config = msgspec.json.decode(compiled.spec["config"], type=ModelConfig)
    for name in [name for name, (part, _) in compiled.files.items() if part in ("before", "after")]:
        aot_compile.make_part(compiled.spec, config, tmp_path, name)
    assert len(exported) == 4


@pytest.mark.skipif(not LONG, reason="compiles for 40 s; runs with NANOPAGE_LONG_TESTS=1")
@pytest.mark.parametrize(
    ("family", "mixer"), [("qwen3_5_text", "linear_attention"), ("granitemoehybrid", "mamba")], ids=lambda name: name
)
def test_compiled_layers_with_matrices_as_states_equal_the_eager_ones(tmp_path, cache, family, mixer):
    layers = [mixer, "attention" if mixer == "mamba" else "full_attention", mixer]
    model = tiny_model(tmp_path, family, num_hidden_layers=3, layer_types=layers)
    compiled_of(model).compile()
    assert_compiled_equals_eager(model, (LENGTHS, [80, 70, 1, 1], [3, 3], [17, 1], [80], [1] * 9))


@pytest.mark.skipif(not LONG, reason="compiles for 40 s; runs with NANOPAGE_LONG_TESTS=1")
@pytest.mark.parametrize("tiles", [None, "int8"])
def test_compiled_layers_with_a_state_equal_the_eager_ones(tmp_path, cache, monkeypatch, tiles):
    """In any order: the same code serves both models. A layer with a state, or with attention, may be the last one."""
    for kinds in ("conv full_attention conv conv full_attention", "full_attention conv"):
        layers = {"num_hidden_layers": len(kinds.split()), "layer_types": kinds.split(), "conv_bias": True}
        model = tiny_model(tmp_path / kinds, "lfm2", **layers)
        compiled = compiled_of(model, tiles=tiles)
        assert (compiled.layers is None) == (kinds[0] == "c")
        compiled.compile()
        assert {"mixer-one", "mixer-many", "before-one", "after-many"} < kinds_in(compiled.directory)
        for rows in (64, 2):  # from so many rows on, the threads divide steps
            monkeypatch.setattr(aot_chain, "PART_ROWS", rows)
            assert_compiled_equals_eager(model, (LENGTHS, [3, 3], [17, 1], [1] * 9), tiles)
        engines = [engine_of(model, quantization=tiles, enforce_eager=eager) for eager in (False, True)]
        tokens = [run(engine) for engine in engines]
        assert compiled_in(engines[0]) and list(map(len, tokens[0])) == list(map(len, tokens[1]))
        if tiles is None:
            made = paged(model, True)
            theirs = reference_logits(AutoModelForCausalLM.from_pretrained(model), made.sequences)
            assert_all_close(made.run(PLANS[1]), theirs)
            assert tokens[0] == tokens[1]


@pytest.mark.skipif(not LONG, reason="compiles for 30 s; runs with NANOPAGE_LONG_TESTS=1")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *[("smollm3", {"num_hidden_layers": 5}), ("olmo3", {"num_hidden_layers": 5})],
        *[("glm4", {}), ("ministral3", {"rope_parameters": TEMPERATURE})],
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compiled_layers_with_ropes_of_their_own_equal_the_eager_ones(tmp_path, cache, family, overrides):
    model = tiny_model(tmp_path, family, **overrides)
    compiled_of(model).compile()
    assert_compiled_equals_eager(model, (LENGTHS, [3, 3], [17, 1], [1] * 9))


@pytest.mark.skipif(not LONG, reason="compiles for 50 s; runs with NANOPAGE_LONG_TESTS=1")
@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN has no bfloat16 on this CPU")
def test_compiled_layers_in_bfloat16_are_as_close_to_float32_as_transformers_is(tmp_path, cache):
    # A smaller spread of the weights than elsewhere, so that rounding does not grow from layer to layer.
    options = {"initializer_range": 0.08, "tie_word_embeddings": True, "vocab_size": 320}
    model = tiny_model(tmp_path, "qwen2", torch.bfloat16, **options)
    compiled_of(model, torch.bfloat16).compile()
    sequences = random_tokens(LENGTHS)
    exact, theirs = (
        reference_logits(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), sequences)
        for dtype in (torch.float32, torch.bfloat16)
    )
    compiled = paged(model, True, torch.bfloat16)

    def error(logits):
        return torch.cat([(a.float() - b).flatten() for a, b in zip(logits, exact, strict=True)]).square().mean().sqrt()

    for plan in PLANS:
        compiled.restart(sequences)
        assert error(compiled.run(plan)) < 1.5 * error(theirs)
    assert compiled.way.head is not None
    x = torch.randn(1, compiled.way.config.hidden_size).bfloat16()
    torch.testing.assert_close(compiled.way.head(x), compiled.model.logits(x), rtol=2**-6, atol=0.01)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_the_compiled_head_equals_the_eager_one(model, directory, num_rows):
    made = paged(model, compiled=True)
    if made.way.head is None:
        pytest.skip("this version of oneDNN lays out a matrix of this size differently")
    hidden = torch.randn(num_rows, made.way.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits, expected = made.way.head(hidden), made.model.logits(hidden)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        if num_rows == 1:
            assert made.way.head.of_one_row(hidden)[1].tolist() == expected.argmax(1).tolist()
            hidden[0, 0] = torch.nan
            assert made.way.head.of_one_row(hidden)[1].tolist() == [NO_TOKEN]


def test_a_head_without_tiles_stays_as_it_is(directory, tmp_path, monkeypatch):
    """The vocabulary of 300 does not fill its tiles."""
    path = tiny_model(tmp_path, **MODEL)
    monkeypatch.setattr(aot, "_key", lambda *_: str(directory))  # the layers are the same
    engine = engine_of(path)
    compiled = compiled_in(engine)
    assert compiled.model.lm_head.weight.tiles is compiled.head is None
    assert run(engine) == run(engine_of(path, enforce_eager=True))


class Steps(list):
    """Notes which steps a compiled way runs as a decode of one sequence."""

    def __init__(self, compiled):
        self.run, self.decode_one = compiled.run, compiled._decode_one
        compiled.run, compiled._decode_one = self._run, self._decode_one

    def _run(self, batch):
        self.append((len(batch.rows), False))
        return self.run(batch)

    def _decode_one(self, *arguments):
        self[-1] = (1, True)
        return self.decode_one(*arguments)


@pytest.mark.parametrize(
    ("params", "alone"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1.0, "seed": 5}, True),
        ({"temperature": 1.0, "top_k": 3, "seed": 5}, True),
        ({"temperature": 0, "repetition_penalty": 1.7, "logprobs": 3}, True),
        ({"temperature": 0, "logit_bias": {7: 100.0}}, True),
        ({"temperature": 0, "prompt_logprobs": 2}, False),
    ],
    ids=str,
)
def test_a_decode_by_itself_gives_the_same_tokens(model, directory, params, alone):
    outputs = []
    for eager in (True, False):
        engine = engine_of(model, enforce_eager=eager)
        steps = None if eager else Steps(compiled_in(engine))
        engine.add_request("0", [5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True, **params))
        outputs.append(finish(engine)["0"].outputs[0].token_ids)
    has_head = compiled_in(engine).head is not None
    assert outputs[0] == outputs[1]
    assert steps[0] == (1, False) and steps[1:] == [(1, alone and has_head)] * 11


def test_embeddings_in_place_of_tokens_give_the_same_tokens(model, directory):
    """Also a prompt of one token, which is a step of a single token."""
    engine = engine_of(model, enable_prompt_embeds=True, enable_prefix_caching=False)
    assert compiled_in(engine) is not None
    rows = load_file(model / "model.safetensors")["model.embed_tokens.weight"] * engine.model_config.embedding_scale
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for tokens in random_tokens([1, 17]):
        engine.add_request("tokens", tokens, params)
        engine.add_request("embeds", {"prompt_embeds": rows[tokens]}, params)
        done = finish(engine)
        engine.add_request("alone", {"prompt_embeds": rows[tokens]}, params)
        done |= finish(engine)
        tokens = [output.outputs[0].token_ids for output in done.values()]
        assert tokens == 3 * tokens[:1]


@pytest.mark.parametrize("lengths", [[21], [17, 1, 8], [40, 40], [2], [1, 1], [1, 1, 1]], ids=str)
def test_the_last_layer_computes_only_the_rows_that_are_asked_for(model, directory, lengths):
    sequences = random_tokens(lengths)
    for compiled in (False, True):
        made = paged(model, compiled)
        made.restart(sequences)
        batch = made.batch(dict(enumerate(lengths)))
        made.cache.move(batch)
        made.table.update(batch)
        input_ids, step = prepare(batch, made.table, made.cache)
        forward = made.way._forward if compiled else made.model
        for rows in ([sum(lengths) - 1, 0][: len(lengths)], [0]):
            rows = torch.tensor(rows)
            with torch.inference_mode():
                whole = forward(input_ids, step)
                some = forward(input_ids, replace(step, rows=rows))
            torch.testing.assert_close(some, whole[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[17, 1, 8], [1, 1, 1]], ids=str)
def test_the_inputs_of_layers_that_a_wing_wants(model, directory, lengths):
    found = []
    for compiled in (False, True):
        made = paged(model, compiled)
        made.restart(random_tokens(lengths))
        batch = made.batch(dict(enumerate(lengths)))
        made.cache.move(batch)
        made.table.update(batch)
        input_ids, step = prepare(batch, made.table, made.cache)
        step.taps = dict.fromkeys(range(len(step.kinds) + 1))
        with torch.inference_mode():
            hidden = (made.way._forward if compiled else made.model)(input_ids, step)
        assert hidden is [*step.taps.values()][-1] and len(step.taps) == 3
        found.append([*step.taps.values()])
    assert_all_close(*found)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 1, 9, 17], [1], [6]], ids=str)
@pytest.mark.parametrize("sampled_from", [[0], [1], [2], [0, 2], [0, 0, 1, 1, 1], [0, 1, 2], [1, 3], []], ids=str)
def test_logits_are_those_of_the_rows_that_are_sampled(model, directory, lengths, sampled_from):
    """Some sequences only compute a chunk; completions that are about to fork share a prompt's logits."""
    sampled_from = [index for index in sampled_from if index < len(lengths)]
    outputs = []
    for compiled in (False, True):
        made = paged(model, compiled)
        made.restart(random_tokens(lengths))
        batch = made.batch(dict(enumerate(lengths)))
        for new in batch.new:
            new.sampling = SamplingSettings()  # without prompt_logprobs
        last = [sum(lengths[: index + 1]) - 1 for index in sampled_from]
        batch.sampled_from, batch.sampled_rows = last, list(range(len(sampled_from)))
        made.cache.move(batch)
        made.table.update(batch)
        with torch.inference_mode():
            outputs.append(made.way.run(batch))
    eager, compiled = outputs
    assert eager.hidden is compiled.hidden is None
    if not sampled_from:
        assert eager.logits is compiled.logits is None
        return
    assert len(eager.logits) == len(sampled_from)
    assert_all_close([compiled.logits], [eager.logits])


def test_logits_behind_each_token_of_a_draft(model, directory):
    """Beside a decode and a chunk that sample once, or not at all."""
    outputs, lengths = [], [1, 6, 4]
    for compiled in (False, True):
        made = paged(model, compiled)
        made.restart(random_tokens(lengths))
        batch = made.batch(dict(enumerate(lengths)))
        for new in batch.new:
            new.sampling = SamplingSettings()
        made.cache.move(batch)
        made.table.update(batch)
        for sampled_from, rows in (([0, 7, 8, 9, 10], [0, 2, 2, 2, 2]), (list(range(11)), [0] + [1] * 6 + [2] * 4)):
            batch.sampled_from, batch.sampled_rows = sampled_from, rows
            with torch.inference_mode():
                outputs.append(made.way.run(batch).logits.clone())
            assert sampled_positions(batch).tolist() == [1, *([] if len(rows) == 5 else range(1, 7)), 1, 2, 3, 4]
    some, every, compiled_some, compiled_every = outputs
    assert_all_close([compiled_some, compiled_every], [some, every])
    assert_all_close([some], [every[[0, 7, 8, 9, 10]]])


def test_a_prompt_in_chunks_of_which_most_sample_nothing(model, directory):
    engines = [engine_of(model, max_num_batched_tokens=5, enforce_eager=eager) for eager in (True, False)]
    assert [bool(compiled_in(engine)) for engine in engines] == [False, True]
    assert run(engines[0]) == run(engines[1])


def test_a_head_reads_the_states_of_compiled_layers(model, directory, tmp_path):
    head = save_eagle(tmp_path, 64, vocab_size=FILLING, **{TAPS: [0, 1, 2]})
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    engine = engine_of(model, speculative_config=speculation)
    assert compiled_in(engine)
    assert run(engine) == run(engine_of(model)) and engine.executor.worker.wings.heads.works


def test_there_is_a_file_for_each_kind_of_step_not_for_each_layer_or_window(directory):
    assert kinds_in(directory) == {"chain", "before-one", "after-one", "head-one", "before-many", "after-many"}


SERVE = """
import sys
from nanopage import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=128, num_gpu_blocks_override=32, block_size=8)
assert llm.engine.executor.worker.compiled.layers
prompts = [[5] * n for n in (1, 40, 3, 9, 9)]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
print(sum(len(output.outputs[0].token_ids) for output in outputs))
print(*{"torch._dynamo", "torch._inductor", "nanopage.cpu.aot_compile", "triton"} & set(sys.modules))
"""


def test_a_second_start_never_wakes_the_compiler(model, directory):
    files = {file: file.stat().st_mtime_ns for file in directory.iterdir()}
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(model)], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["45"]
    assert {file: file.stat().st_mtime_ns for file in directory.iterdir()} == files


def test_what_the_code_depends_on_is_in_the_key(model, directory, tmp_path):
    assert compiled_of(model).directory == directory
    others = [compiled_of(model, block_size=16), compiled_of(model, dtype=torch.bfloat16)]
    others += [compiled_of(model, tiles="bfloat16"), compiled_of(model, kv_dtype=torch.bfloat16)]
    others.append(compiled_of(tiny_model(tmp_path / "wider", **MODEL, hidden_size=128)))
    others.append(compiled_of(tiny_model(tmp_path / "another-vocabulary", **MODEL)))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    others.append(compiled_of(model))
    torch.set_num_threads(threads)
    assert len({directory, *(other.directory for other in others)}) == 1 + len(others)
    deeper = tiny_model(tmp_path / "deeper", **MODEL, vocab_size=FILLING, num_hidden_layers=3)
    assert compiled_of(deeper).directory == directory  # one layer's code serves any number


@pytest.fixture
def not_ready(directory, monkeypatch):
    """As if nothing had been compiled; call it for the moment in which everything has."""
    is_ready = False

    def become_ready():
        nonlocal is_ready
        is_ready = True

    monkeypatch.setattr(aot.Compiled, "ready", lambda self: is_ready)
    monkeypatch.setattr(aot.Compiled, "start", lambda self, beside_steps=False: None)
    return become_ready


@pytest.mark.parametrize("num_steps", [0, 2, 9], ids=["before a request", "within its prompt", "within its output"])
def test_the_engine_works_meanwhile_and_changes_over_between_two_steps(model, not_ready, monkeypatch, num_steps):
    """Requests that run go on, with the same tokens."""
    monkeypatch.setattr(aot, "LOOK_SECONDS", 0.0)
    expected = run(engine_of(model, enforce_eager=True, max_num_batched_tokens=5))
    engine = engine_of(model, max_num_batched_tokens=5)
    looked = []

    def look(stats):
        looked.append(bool(compiled_in(engine)))
        if len(looked) == num_steps:
            not_ready()

    engine.listeners.append(look)
    if num_steps == 0:
        not_ready()
    assert run(engine) == expected
    assert looked == [False] * num_steps + [True] * (len(looked) - num_steps) and len(looked) > 12


def sleeping():
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


@pytest.mark.skipif(sys.platform != "linux", reason="nice values")
@pytest.mark.parametrize("rested", [False, True])
def test_an_engine_that_always_has_requests_compiles_beside_them(model, monkeypatch, tmp_path, caplog, rested):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aot, "LOOK_SECONDS", 0.0)
    started = []
    monkeypatch.setattr(aot.Compiled, "_spawn", lambda self: started.append(sleeping()) or started[-1])
    engine = engine_of(model)
    engine.add_request("0", [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    assert not started
    if rested:  # the process that waits for an idle CPU would wait for ever
        finish(engine)
        (idle,) = started
        assert os.getpriority(os.PRIO_PROCESS, idle.pid) == 19
        engine.add_request("1", [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    monkeypatch.setattr(aot, "BUSY_SECONDS", 0.0)
    for _ in range(3):
        engine.step()
    assert len(started) == 1 + rested and engine.has_unfinished_requests()
    assert os.getpriority(os.PRIO_PROCESS, started[-1].pid) == 10
    started.pop().kill()
    assert all(process.wait(timeout=10) == -signal.SIGKILL for process in started)
    assert sum(hasattr(record, "for_user") for record in caplog.records) == 1


@pytest.mark.parametrize("end", ["the last token", "an abort"])
def test_compiling_begins_when_no_request_is_left_and_says_so(model, monkeypatch, tmp_path, end, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started = []
    monkeypatch.setattr(aot.Compiled, "_spawn", lambda self: started.append(self) or subprocess.Popen(["true"]))
    engine = engine_of(model)
    for i in range(2):
        engine.add_request(str(i), [5, 6, 7], SamplingParams(temperature=1.0, max_tokens=4 + i, ignore_eos=True))
    while engine.has_unfinished_requests():
        assert not started
        if engine.step()[-1].outputs[0].token_ids[3:] and end == "an abort":
            engine.abort("1")
    assert len(started) == 1
    run(engine)
    assert len(started) == 1
    (told,) = [record.getMessage() for record in caplog.records if hasattr(record, "for_user")]
    assert "are being compiled" in told and "three times as fast" in told


def compile_by_command(*arguments):
    done = CliRunner().invoke(app, ["compile", *map(str, arguments), "--dtype", "float32", "--block-size", "8"])
    return done.exit_code, done.stderr


def test_the_command_says_that_everything_is_compiled(model, directory):
    assert compile_by_command(model) == (0, f"already compiled: {directory}\n")


def test_the_command_compiles_and_shows_the_progress(model, directory, tmp_path, monkeypatch):
    made = tmp_path / "made"
    monkeypatch.setattr(aot, "_key", lambda *_: str(made))
    copy = "mkdir -m 700 $1; for file in $0/*.so; do cp -p $file $1; sleep 0.2; done"
    monkeypatch.setattr(
        aot.Compiled,
        "_spawn",
        lambda self: subprocess.Popen(["sh", "-c", copy, str(directory), str(made)], start_new_session=True),
    )
    seen = []
    monkeypatch.setattr(Progress, "update", lambda self, task, **fields: seen.append(fields.get("completed")))
    code, stderr = compile_by_command(model)
    assert code == 0 and f"compiled: {made}" in stderr, stderr
    counts = [count for count in seen if count is not None]
    assert counts == sorted(counts) and len(set(counts)) > 2 and max(counts) <= len(list(made.glob("*.so")))


def test_an_engine_with_adapters_finds_what_the_command_has_compiled(directory, tmp_path, monkeypatch, caplog):
    """Whatever number and rank of adapters it allows. An engine without adapters finds it, too."""
    model = tiny_model(tmp_path / "model", "qwen2", vocab_size=FILLING)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def pretend(compiled):
        """Other code of the same parts stands in for that with adapters. It is loaded, but never runs."""
        for name in compiled.files:
            if find_file(compiled.directory, name) is None:
                source = find_file(directory, name.replace("-adapted", ""))
                shutil.copy(source, compiled.directory / name.replace(".so", f".{digest(source)}.so"))
        return subprocess.Popen(["true"], start_new_session=True)

    monkeypatch.setattr(aot.Compiled, "_spawn", pretend)
    caplog.set_level(logging.INFO, logger="nanopage")
    assert compile_by_command(model)[0] == 0
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64}
    assert not compiled_in(engine_of(model, **lora))
    code, stderr = compile_by_command(model, "--enable-lora")
    made = compiled_in(engine_of(model, **lora))
    assert code == 0 and f"compiled: {made.directory}" in stderr
    assert compile_by_command(model, "--enable-lora") == (0, f"already compiled: {made.directory}\n")
    assert compiled_in(engine_of(model)).directory == made.directory


def test_the_command_names_what_cannot_be_compiled(model, tmp_path):
    done = CliRunner().invoke(app, ["compile", str(model), "--dtype", "float16"])
    assert done.exit_code == 1 and "nothing to compile: steps run eagerly: float16" in done.stderr
    assert compile_by_command(tmp_path / "no-model")[0] == 1
    code, stderr = compile_by_command(tiny_model(tmp_path / "phi3", "phi3"), "--enable-lora")
    assert code == 1 and "enable_lora does not work with this model" in stderr


def test_compiling_can_be_refused(model, directory, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("NANOPAGE_COMPILE", "never")
    assert compiled_in(engine_of(model))  # what exists is used
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, logger="nanopage"):
        engine = engine_of(model)
    assert "steps run eagerly: NANOPAGE_COMPILE=never" in caplog.messages
    assert run(engine) == run(engine) == run(engine_of(model, enforce_eager=True))
    assert engine.executor.worker.compiled._process is None
    with pytest.raises(RuntimeError, match="NANOPAGE_COMPILE=never"):
        engine.executor.compile()
    monkeypatch.setenv("NANOPAGE_COMPILE", "later")
    with pytest.raises(ValueError, match="NANOPAGE_COMPILE must be 'never' or not set, got 'later'"):
        engine_of(model)


def test_enforce_eager_compiles_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = engine_of(model, enforce_eager=True)
    engine.executor.compile()  # nothing
    assert run(engine)
    assert engine.executor.worker.compiled is None
    assert list(tmp_path.iterdir()) == []


def test_how_steps_run_is_logged_at_start(model, directory, tmp_path, monkeypatch, caplog):
    def said(**options):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="nanopage"):
            engine_of(model, **options)
        return [message for message in caplog.messages if message.startswith("steps run")]

    assert said() == ["steps run with compiled layers"]
    assert said(enforce_eager=True) == ["steps run eagerly"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert said() == ["steps run eagerly until the layers are compiled"]


def test_a_dtype_there_is_no_compiled_code_for_is_said_to_run_eagerly(model, caplog):
    with caplog.at_level(logging.INFO, logger="nanopage"):
        assert engine_of(model, dtype="float64").executor.worker.compiled is None
    assert "steps run eagerly: float64 is not compiled on this CPU" in caplog.text


def test_without_a_cpp_compiler_it_says_so_once_and_stays_eager(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = engine_of(model)
    with pytest.raises(RuntimeError, match="compiling the decoder layer failed"):
        engine.executor.compile()
    with caplog.at_level(logging.WARNING, logger="nanopage"):
        first, second = run(engine), run(engine)
    assert not compiled_in(engine)
    assert first == second == run(engine_of(model, enforce_eager=True))
    assert caplog.text.count("compiling the decoder layer failed") <= 1


def test_two_processes_that_compile_at_once_write_to_logs_of_their_own(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do echo $$ $i; sleep 0.05; done\nexit 1\n")
    slow.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(slow))
    both = [compiled_of(model) for _ in range(2)]
    for compiled in both:
        compiled.start()
    assert both[0].directory == both[1].directory
    for compiled in both:
        process = compiled._process
        with pytest.raises(RuntimeError, match=f"{process.pid} 9") as raised:
            compiled.compile()
        assert str(raised.value).splitlines()[1:] == [f"{process.pid} {i}" for i in range(1, 10)]


@pytest.fixture
def copy(directory, tmp_path, monkeypatch):
    """The same compiled code in a directory of its own, to be spoilt. Engines look there."""
    made = tmp_path / "copy"
    shutil.copytree(directory, made)
    made.chmod(0o700)
    monkeypatch.setattr(aot, "_key", lambda *_: str(made))
    return made


ONE = "before-one.so"
SPOIL = {
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 40),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1000]),
    "one bit": lambda file: file.write_bytes(file.read_bytes()[:-5000] + b"!" + file.read_bytes()[-4999:]),
    "another graph": lambda file: file.write_bytes(next(file.parent.glob("after-one.*")).read_bytes()),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL.keys())
def test_a_damaged_file_is_named_set_aside_and_made_again(model, copy, monkeypatch, caplog, spoil):
    file = find_file(copy, ONE)
    whole = file.read_bytes()
    spoil(file)
    made = []

    def make_again(self):
        made.append(find_file(self.directory, ONE))
        file.write_bytes(whole)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(aot.Compiled, "_spawn", make_again)
    with caplog.at_level(logging.WARNING, "nanopage"):
        engine = engine_of(model)
    assert not compiled_in(engine)
    assert [r.message for r in caplog.records if str(file) in r.message and "damaged" in r.message]
    assert len(caplog.records) == 1
    assert file.with_suffix(".damaged").exists()
    assert run(engine) == run(engine_of(model, enforce_eager=True))
    assert made == [None]
    assert run(engine) == run(engine_of(model, enforce_eager=True))
    assert compiled_in(engine)


def test_compiling_now_makes_a_damaged_file_again(model, copy, monkeypatch):
    file = find_file(copy, ONE)
    whole = file.read_bytes()
    compiled = compiled_of(model)
    compiled.layers = None  # as if it had not been ready at first
    file.unlink()  # not overwritten: the library is mapped into this process
    file.touch()
    monkeypatch.setattr(aot.Compiled, "_spawn", lambda self: (file.write_bytes(whole), subprocess.Popen(["true"]))[1])
    compiled.compile()
    assert compiled.layers


def test_a_file_that_is_damaged_again_is_left_alone(model, copy, monkeypatch, caplog):
    file = find_file(copy, ONE)
    monkeypatch.setattr(aot.Compiled, "_spawn", lambda self: (file.touch(), subprocess.Popen(["true"]))[1])
    file.write_bytes(b"")
    engine = engine_of(model)
    for _ in range(4):
        assert run(engine)
    assert not compiled_in(engine)
    assert caplog.text.count("is damaged again") == 1
    with pytest.raises(RuntimeError, match="compiling the decoder layer failed"):
        engine.executor.compile()


@pytest.mark.parametrize("content", ["no library", "a library without these functions"])
@pytest.mark.parametrize("name", [ONE, aot_parts.CHAIN])
def test_code_that_cannot_be_loaded_leaves_the_engine_eager(model, copy, caplog, name, content):
    """As on a file system that is mounted without permission to execute, or with another version of torch."""
    expected = run(engine_of(model, enforce_eager=True))
    file, other = (
        find_file(copy, name),
        find_file(copy, aot_parts.CHAIN if name == ONE else ONE),
    )
    file.write_bytes(b"no library" if content == "no library" else other.read_bytes())
    file.rename(file.with_name(name.replace(".so", f".{digest(file)}.so")))
    engine = engine_of(model)
    assert run(engine) == run(engine) == expected
    assert not compiled_in(engine)
    assert caplog.text.count("cannot be loaded") == 1 and str(copy) in caplog.text


@pytest.mark.parametrize("shared", ["directory", "file"])
def test_code_that_others_can_write_is_not_loaded(model, copy, caplog, shared):
    (copy if shared == "directory" else find_file(copy, ONE)).chmod(0o777)
    assert not compiled_in(engine_of(model))
    assert "other users may write to it" in caplog.text


@pytest.mark.parametrize(
    "obstacle", ["no directory", "a file is in the way", "no process", "no memory", "writable by others"]
)
def test_where_nothing_can_be_compiled_requests_are_answered_eagerly(model, tmp_path, monkeypatch, caplog, obstacle):
    home = tmp_path / "cache"
    if obstacle == "no directory":
        home = Path("/dev/null/cache")
    elif obstacle == "a file is in the way":
        home.mkdir()
        (home / "nanopage").touch()
    elif obstacle == "writable by others":
        shared = home / "nanopage" / "compiled"
        shared.mkdir(parents=True)
        monkeypatch.setattr(aot, "_key", lambda *_: "key")
        (shared / "key").mkdir()
        (shared / "key").chmod(0o777)
    else:
        error = BlockingIOError(11, "no process") if obstacle == "no process" else OSError(12, "no memory")

        def refuse(*args, **options):
            raise error

        monkeypatch.setattr(aot.subprocess, "Popen", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    expected = run(engine_of(model, enforce_eager=True))
    engine = engine_of(model)
    assert run(engine) == run(engine) == expected
    assert caplog.text.count("the decoder layer cannot be compiled") == 1
    assert not compiled_in(engine)


def test_a_priority_that_is_refused_does_not_matter(model, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aot.os, "sched_setscheduler", refuse, raising=False)
    monkeypatch.setattr(aot.Compiled, "_spawn", lambda self: subprocess.Popen(["sleep", "60"], start_new_session=True))
    engine = engine_of(model)
    assert run(engine)
    process = engine.executor.worker.compiled._process
    assert process.poll() is None
    process.kill()
    process.wait()


def test_two_programs_do_not_compile_the_same_at_once(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aot.Compiled, "_spawn", lambda self: subprocess.Popen(["true"]))
    compiled = compiled_of(model)
    compiled.directory.mkdir(parents=True, mode=0o700)
    new, old = compiled.directory / "log-new", compiled.directory / "log-old"
    for log in (new, old):
        log.touch()
    os.utime(old, (0, 0))
    with FileLock(compiled.directory / LOCK):
        compiled.start()
        assert compiled._process is None and not compiled._given_up and old.exists()
    compiled.start()
    assert compiled._process.wait() == 0
    assert new.exists() and not old.exists()  # the other may still be written to
    compiled._process, compiled._niceness, compiled.spec["adapted"] = None, 0, True  # another engine
    compiled.start()
    first, second = (text for text in caplog.messages if "the first replies are slow" in text)
    assert "in the background. After" in first and "in the background, once more for steps with adapters" in second


def test_compiling_ends_after_its_time(model, tmp_path):
    """With the C++ compilers that it runs."""
    slow = tmp_path / "slow-g++"
    slow.write_text("#!/bin/sh\nsleep 100\n")
    slow.chmod(0o700)
    made = tmp_path / "made"
    made.mkdir(mode=0o700)
    code = "import sys; from nanopage.cpu import aot, aot_compile as c; c.TIME_LIMIT = 6; "
    code += "c._probe_compiler = lambda: None; import json, pathlib; "
    code += "c.main(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(compiled_of(model).spec), str(made)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CXX": str(slow)}, start_new_session=True,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "compiling took longer than 6 s" in process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGKILL
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(slow) in (p.info["cmdline"] or [])]


def test_without_memory_nothing_is_compiled(monkeypatch):
    def available(gib):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(gib * 2**30)))

    available(0.9)
    with pytest.raises(MemoryError, match=r"needs 1 GiB of memory, and 0\.90 GiB"):
        aot_compile._num_processes(8)
    for gib, threads, expected in ((1.5, 8, 1), (3.5, 8, 3), (3.5, 2, 2), (100, 64, aot_compile.MAX_PROCESSES)):
        available(gib)
        assert aot_compile._num_processes(threads) == expected


def test_an_interrupted_command_leaves_nothing_running(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aot.Compiled, "_spawn", lambda self: subprocess.Popen(["sleep", "60"], start_new_session=True))
    compiled = compiled_of(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled.compile(interrupt)
    assert compiled._process.poll() is not None


@pytest.mark.parametrize("tiled", [False, True])
def test_without_the_weights_of_adapters_a_layer_has_the_tensors_of_one_without_slots(tmp_path, tiled):
    config = loader.read_config(tiny_model(tmp_path, "qwen3", attention_bias=True))

    def layer_of(adapted):
        model = build_model(config, torch.float32, CPU)
        tile(model, "int8") if tiled else pack(model)
        model = AdaptedDecoder(model, 2, 4, torch.float32, CPU, None) if adapted else model
        return model.layers[0]

    names, adapted = list(aot.tensors_of(layer_of(False))), layer_of(True)
    assert [name.replace(".weight.weight.", ".weight.") for name in aot.own_tensors_of(adapted)] == names
    assert len(aot.tensors_of(adapted)) == len(names) + 8  # a and b of four products


@pytest.mark.skipif(not LONG, reason="compiles for 40 s; runs with NANOPAGE_LONG_TESTS=1")
@pytest.mark.parametrize(
    ("windows", "options"),
    [
        ({}, {}),
        # Two kinds of layers, with the same compiled code. Most contexts are longer than the window.
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2, "num_hidden_layers": 4}, {}),
        ({}, {"quantization": "int8"}),
    ],
    ids=["plain", "windows", "int8"],
)
def test_compiled_layers_with_adapters_equal_the_eager_ones(tmp_path, cache, monkeypatch, windows, options):
    monkeypatch.setattr(aot_chain, "PART_ROWS", 2)  # the threads divide steps
    model = tiny_model(tmp_path / "model", "qwen2", vocab_size=FILLING, **windows)
    adapters = [
        LoRARequest(str(i), i + 1, str(save_adapter(tmp_path / str(i), model, rank=rank, seed=i)))
        for i, rank in enumerate((4, 8, 1))
    ]
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "enable_prefix_caching": False}
    plain = engine_of(model, **options)
    plain.executor.compile()
    quantization = ("--quantization", options["quantization"]) if options else ()
    assert compile_by_command(model, "--enable-lora", *quantization)[0] == 0
    made = []
    for eager in (True, False):
        engine = engine_of(model, enforce_eager=eager, **lora, **options)
        outputs = {}
        for batch in ([0], [None], [0, 1, None, 2, 0, 0], [None, None]):  # adapters of requests at the same time
            for i, adapter in enumerate(batch):
                request = None if adapter is None else adapters[adapter]
                name, (prompt,) = f"{batch} {i}", random_tokens([1 + 5 * i], seed=i)
                params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
                engine.add_request(name, prompt, params, lora_request=request)
            while engine.has_unfinished_requests():
                outputs |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        made.append(outputs)
    assert engine.scheduler.block_manager.windows == ((None, 7) if windows else (None,))
    compiled = compiled_in(engine)
    assert compiled is not None and compiled.directory == plain.executor.worker.compiled.directory
    assert {f"{part}-adapted-{kind}" for part in ("before", "after") for kind in ("one", "many")} < kinds_in(
        compiled.directory
    )
    for name, theirs in made[0].items():
        ours = made[1][name]
        if options:  # activations that are rounded to int8
            assert len(ours.token_ids) == len(theirs.token_ids)
            continue
        assert ours.token_ids == theirs.token_ids
        for left, right in zip(ours.logprobs, theirs.logprobs, strict=True):
            for token_id in left:
                assert left[token_id].logprob == pytest.approx(right[token_id].logprob, abs=1e-3)


def test_compiled_layers_go_on_with_other_weights(model, directory, tmp_path):
    """In place: their inputs have the addresses. The pages of a KV cache that slept are zeros, at the same place."""
    engine, new = engine_of(model), engine_of(tiny_model(tmp_path, **MODEL, vocab_size=FILLING, seed=1))
    before, compiled = run(engine), compiled_in(engine)
    standby.update_weights(engine, tmp_path)
    standby.sleep(engine)
    standby.wake_up(engine)
    assert compiled_in(engine) is compiled is not None and compiled_in(new) is not None
    assert run(engine) == run(new) != before
