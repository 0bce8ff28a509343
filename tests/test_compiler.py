"""aot.py: graphs equal the layers they stand for, are made once, in the background, and leave nothing behind."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import CPU, LONG, Paged, assert_all_close, random_tokens, reference_logits, tiny_model
from test_models import LENGTHS, PLANS
from transformers import AutoModelForCausalLM

from nanopage import EngineConfig, LLMEngine, SamplingParams
from nanopage.layers.embedding import LMHead
from nanopage.weights import hub, loader
from nanopage.worker import aot
from nanopage.worker.device import computes_natively

ROOT = Path(__file__).parent.parent
# Layers with windows, biases, and sizes that oneDNN keeps in tiles (the MLP's are not). In a long run the layers differ
# in their windows. The default model, which test_default_model.py compiles, has none.
MODEL = {"family": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": int(LONG)}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of compiled code of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield hub.cache_directory()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), **MODEL)


def graphs_of(model, **options) -> aot.Graphs:
    options = {"dtype": torch.float32, "block_size": 8} | options
    return aot.Graphs(model, loader.read_config(model), **options)


def kinds_in(directory: Path) -> set[str]:
    return {file.name.split(".")[0] for file in directory.glob("*.pt2")}


@pytest.fixture(scope="module")
def somebody_else(model, tmp_path_factory):
    """A directory of a config.json and Python files that leave the file `sprung` and exit when they are imported."""
    directory = tmp_path_factory.mktemp("a model of somebody else")
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    for name in ("nanopage", "torch", "filelock", "hashlib"):
        trap = f"open({str(directory / 'sprung')!r}, 'w').close()\nraise SystemExit(3)\n"
        (directory / f"{name}.py").write_text(trap)
    return directory


@pytest.fixture(scope="module")
def compilation(somebody_else, cache):
    """The one compilation of this module, of the model in `somebody_else`, which is the working directory, too."""
    graphs = graphs_of(somebody_else)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(somebody_else)
        patch.setenv("PYTHONPATH", os.pathsep.join(["", ".", str(ROOT)]))
        graphs.start()
    graphs._process.wait(600)
    return graphs


@pytest.fixture(scope="module")
def graphs(model, compilation):
    made = graphs_of(model)
    assert made.ready(), compilation._log.read_text()
    return made


def test_the_compiling_process_reads_nothing_of_a_model_but_its_config(somebody_else, compilation, tmp_path):
    assert compilation._process.returncode == 0, compilation._log.read_text()
    assert {file.name for file in somebody_else.iterdir() if file.suffix != ".py"} == {"config.json"}
    graphs = graphs_of(somebody_else)
    graphs.spec["path"] = str(tmp_path)
    graphs.directory = tmp_path / "made"
    assert graphs._spawn().wait(300) != 0
    assert f"{tmp_path}/config.json" in graphs._log.read_text()


def test_the_compiling_process_runs_no_code_in_the_working_directory(somebody_else, compilation):
    assert compilation._process.returncode == 0, compilation._log.read_text()
    sprung = somebody_else / "sprung"
    assert not sprung.exists()
    for name in ("nanopage", "torch", "filelock", "hashlib"):  # the traps work
        assert subprocess.run([sys.executable, "-c", f"import {name}"], cwd=somebody_else).returncode == 3
        sprung.unlink()


def engine_of(model, **options) -> LLMEngine:
    defaults = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 32, "block_size": 8}
    return LLMEngine(EngineConfig(model=str(model), device="cpu", **defaults | options))


def run(engine) -> list[list[int]]:
    for i, prompt in enumerate(random_tokens([17, 1, 8])):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    return [done[str(i)] for i in range(3)]


def test_compiled_layers_equal_the_eager_ones_at_any_size(model, graphs):
    eager = Paged(model, random_tokens(LENGTHS))
    compiled = Paged(model, random_tokens(LENGTHS), graphs=graphs)
    assert compiled.runner.compiled
    for lengths in (LENGTHS, [40], [2], [1], [3, 3], [17, 1], [1] * 9):
        sequences = random_tokens(lengths, seed=len(lengths))
        for plan in PLANS:
            compiled.restart(sequences)
            eager.restart(sequences)
            assert_all_close(compiled.run(plan), eager.run(plan))


@pytest.mark.skipif(not computes_natively("bfloat16", CPU), reason="bfloat16 is emulated here and runs eagerly")
def test_compiled_layers_in_bfloat16_are_as_close_to_float32_as_transformers_is(tmp_path, cache):
    # A smaller spread of the weights than elsewhere, so that rounding does not grow from layer to layer.
    tiny_model(tmp_path, dtype=torch.bfloat16, initializer_range=0.08)
    graphs = graphs_of(tmp_path, dtype=torch.bfloat16)
    graphs.wait()
    sequences = random_tokens(LENGTHS)
    exact = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), sequences)
    theirs = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), sequences)
    compiled = Paged(tmp_path, sequences, torch.bfloat16, graphs)
    assert compiled.runner.compiled

    def error(logits):
        return (torch.cat(logits).float() - torch.cat(exact)).square().mean().sqrt()

    spread = torch.cat(exact).std()
    for plan in PLANS:
        compiled.restart(sequences)
        got = compiled.run(plan)
        print(f"\n{plan.__name__}: {error(got) / spread:.4f} of the spread; transformers {error(theirs) / spread:.4f}")
        assert error(got) < 0.05 * spread
        assert error(got) < 1.5 * error(theirs)


@pytest.mark.skipif(not LONG, reason="compiles for 50 s; runs with NANOPAGE_LONG_TESTS=1")
def test_compiled_layers_of_int8_weights_equal_the_eager_ones(tmp_path, cache):
    # Sizes that fill their tiles and some that do not, a tied head that does not.
    model = tiny_model(tmp_path, hidden_size=96, num_attention_heads=6, mlp_bias=True, tie_word_embeddings=True)
    graphs = graphs_of(model, quantization="int8")
    graphs.wait()
    assert kinds_in(graphs.directory) == {"head", "head-of-few", "before", "after", "one", "decode", "tile"}
    eager = Paged(model, random_tokens(LENGTHS), quantization="int8")
    compiled = Paged(model, random_tokens(LENGTHS), graphs=graphs, quantization="int8")
    assert compiled.runner.compiled
    for lengths in (LENGTHS, [3, 3], [17, 1], [1] * 9):
        sequences = random_tokens(lengths, seed=len(lengths))
        for plan in PLANS:
            compiled.restart(sequences)
            eager.restart(sequences)
            assert_all_close(compiled.run(plan), eager.run(plan))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_the_head_of_a_single_row_serves_any_vocabulary(graphs, num_rows):
    for vocab_size in (64, 320):
        head = LMHead(graphs.config.hidden_size, vocab_size).requires_grad_(False)
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)))
        head.pack()
        if head.tiles is None:
            pytest.skip("this version of oneDNN lays out a matrix of this size differently")
        x = torch.randn(num_rows, head.in_features, generator=torch.Generator().manual_seed(1))
        graph = aot._CompiledHead(aot._load(aot.find_file(graphs.directory, aot.HEAD)), None, head)
        torch.testing.assert_close(graph(x), head(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[21], [17, 1, 8], [40, 40], [2]], ids=str)
def test_the_last_layer_computes_only_the_rows_that_are_asked_for(model, graphs, lengths):
    sequences = random_tokens(lengths)
    for kind in (None, graphs):
        paged = Paged(model, sequences, graphs=kind)
        batch = paged.batch(dict(enumerate(lengths)))
        rows = torch.tensor([sum(lengths) - 1, 0][: len(lengths)])
        with torch.inference_mode():
            whole = paged.runner.model(*paged.runner.prepare(batch))
            some = paged.runner.model(*paged.runner.prepare(batch), rows)
        torch.testing.assert_close(some, whole[rows], rtol=1e-4, atol=1e-4)


def test_a_prompt_in_chunks_of_which_most_sample_nothing(model, graphs):
    engines = [engine_of(model, max_num_batched_tokens=5, enforce_eager=eager) for eager in (True, False)]
    assert [engine.runner.compiled for engine in engines] == [False, True]
    assert run(engines[0]) == run(engines[1])


def test_there_is_a_graph_for_each_kind_of_step_and_window_not_for_each_layer(graphs):
    kinds = {"head", "before", "after", "one-window-7", "decode-window-7", "tile-window-7"}
    assert kinds_in(graphs.directory) == (kinds | {"one", "decode", "tile"} if LONG else kinds)


SERVE = """
import sys
from nanopage import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=128, num_gpu_blocks_override=32, block_size=8)
assert llm.engine.runner.compiled
prompts = [[5] * n for n in (1, 40, 3, 9, 9)]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
print(sum(len(output.outputs[0].token_ids) for output in outputs))
print(*{"torch._dynamo", "torch._inductor"} & set(sys.modules))
"""


def test_a_second_start_never_wakes_the_compiler(model, graphs):
    files = {file: file.stat().st_mtime_ns for file in graphs.directory.iterdir()}
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(model)], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["45"]
    assert {file: file.stat().st_mtime_ns for file in graphs.directory.iterdir()} == files


def test_what_the_code_depends_on_is_in_the_key(model, graphs, tmp_path):
    assert graphs_of(model).directory == graphs.directory
    others = [graphs_of(model, block_size=16), graphs_of(model, dtype=torch.bfloat16)]
    others.append(graphs_of(model, quantization="int8"))
    others.append(graphs_of(tiny_model(tmp_path / "wider", **MODEL, hidden_size=128)))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    others.append(graphs_of(model))
    torch.set_num_threads(threads)
    assert len({graphs.directory, *(other.directory for other in others)}) == 6
    deeper = tiny_model(tmp_path / "deeper", **MODEL, num_hidden_layers=3)
    assert graphs_of(deeper).directory == graphs.directory  # one layer's code serves any number


def test_the_engine_works_meanwhile_and_changes_over_between_requests(model, graphs, monkeypatch, tmp_path):
    expected = run(engine_of(model, enforce_eager=True))
    ready = False
    monkeypatch.setattr(aot.Graphs, "ready", lambda self: ready)
    monkeypatch.setattr(aot.Graphs, "start", lambda self: None)
    engine = engine_of(model)
    engine.add_request("first", [5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    ready = True
    engine.add_request("second", [5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    assert not engine.runner.compiled  # one is at work
    while engine.has_unfinished_requests():
        engine.step()
    assert run(engine) == expected
    assert engine.runner.compiled


def test_enforce_eager_compiles_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = engine_of(model, enforce_eager=True)
    assert engine.runner.graphs is None
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_there_is_no_compiled_code_for_is_said_to_run_eagerly(model, caplog):
    with caplog.at_level(logging.INFO, logger="nanopage"):
        assert engine_of(model, dtype="float64").runner.graphs is None
    assert "float64 on cpu runs eagerly" in caplog.text


def test_without_a_cpp_compiler_it_says_so_once_and_stays_eager(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = engine_of(model)
    with pytest.raises(RuntimeError, match="compiling the decoder layer failed"):
        engine.runner.use_graphs(wait=True)
    with caplog.at_level(logging.WARNING, logger="nanopage"):
        first, second = run(engine), run(engine)
    assert not engine.runner.compiled
    assert first == second == run(engine_of(model, enforce_eager=True))
    assert caplog.text.count("compiling the decoder layer failed") <= 1


def copied(graphs, directory) -> aot.Graphs:
    """The same graphs in a directory of their own, to be spoilt."""
    shutil.copytree(graphs.directory, directory)
    directory.chmod(0o700)
    copy = graphs_of_same(graphs)
    copy.directory = directory
    return copy


def graphs_of_same(graphs) -> aot.Graphs:
    return aot.Graphs(Path(graphs.spec["path"]), graphs.config, torch.float32, graphs.spec["block_size"])


ONE = "one-window-7.pt2"
SPOIL = {
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 40),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1000]),
    "one bit": lambda file: file.write_bytes(file.read_bytes()[:-5000] + b"!" + file.read_bytes()[-4999:]),
    "another graph": lambda file: file.write_bytes(next(file.parent.glob("after.*")).read_bytes()),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL.keys())
def test_a_damaged_file_is_named_set_aside_and_made_again(model, graphs, tmp_path, monkeypatch, caplog, spoil):
    spoilt = copied(graphs, tmp_path / "copy")
    file = aot.find_file(spoilt.directory, ONE)
    whole = file.read_bytes()
    spoil(file)
    made = []

    def make_again(self):
        made.append(aot.find_file(self.directory, ONE))
        file.write_bytes(whole)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(aot.Graphs, "_spawn", make_again)
    monkeypatch.setattr("nanopage.engine.engine.Graphs", lambda *_: spoilt)
    with caplog.at_level(logging.WARNING, "nanopage"):
        engine = engine_of(model)
    assert not engine.runner.compiled
    assert [r.message for r in caplog.records if str(file) in r.message and "damaged" in r.message]
    assert len(caplog.records) == 1
    assert file.with_suffix(".damaged").exists()
    assert run(engine) == run(engine_of(model, enforce_eager=True))
    assert made == [None]
    assert run(engine) == run(engine_of(model, enforce_eager=True))
    assert engine.runner.compiled


def test_a_file_that_is_damaged_again_is_left_alone(model, graphs, tmp_path, monkeypatch, caplog):
    spoilt = copied(graphs, tmp_path / "copy")
    file = aot.find_file(spoilt.directory, ONE)
    monkeypatch.setattr(aot.Graphs, "_spawn", lambda self: (file.touch(), subprocess.Popen(["true"]))[1])
    monkeypatch.setattr("nanopage.engine.engine.Graphs", lambda *_: spoilt)
    file.write_bytes(b"")
    engine = engine_of(model)
    for _ in range(4):
        assert run(engine)
    assert not engine.runner.compiled
    assert caplog.text.count("is damaged again") == 1


def test_code_that_cannot_be_unpacked_leaves_the_engine_eager(model, graphs, tmp_path, monkeypatch, caplog):
    expected = run(engine_of(model, enforce_eager=True))
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))  # read by torch's C++ code
    engine = engine_of(model)
    assert run(engine) == run(engine) == expected
    assert not engine.runner.compiled
    assert caplog.text.count("cannot be loaded") == 1 and str(graphs.directory) in caplog.text


def test_code_that_others_can_write_is_not_loaded(model, graphs, tmp_path, monkeypatch, caplog):
    for name in ("directory", "file"):
        shared = copied(graphs, tmp_path / name)
        (shared.directory if name == "directory" else aot.find_file(shared.directory, ONE)).chmod(0o777)
        monkeypatch.setattr("nanopage.engine.engine.Graphs", lambda *_, shared=shared: shared)
        caplog.clear()
        assert not engine_of(model).runner.compiled
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
    assert not engine.runner.compiled


def test_a_priority_that_is_refused_does_not_matter(model, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aot.os, "sched_setscheduler", refuse, raising=False)
    monkeypatch.setattr(aot.Graphs, "_spawn", lambda self: subprocess.Popen(["sleep", "60"], start_new_session=True))
    engine = engine_of(model)
    assert run(engine)
    process = engine.runner.graphs._process
    assert process.poll() is None
    engine.runner.graphs.stop()
    assert process.poll() is not None


WORK = """
import sys, time
from nanopage import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=128, num_gpu_blocks_override=32, block_size=8)
llm.generate([[5], [6]], SamplingParams(max_tokens=2), use_tqdm=False)
print(llm.engine.runner.graphs._process.pid, flush=True)
time.sleep(120)
"""


# What is killed cannot clean up; without a handler, nor can what is terminated.
@pytest.mark.parametrize("number", [signal.SIGKILL, *[signal.SIGTERM] * LONG], ids=lambda number: number.name)
def test_what_is_still_compiling_ends_when_its_parent_is_killed(model, tmp_path, number):
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", WORK, str(model)], env=env, stdout=subprocess.PIPE) as parent:
        compiling = psutil.Process(int(parent.stdout.readline()))
        family = [compiling, *compiling.children(recursive=True)]
        parent.kill()
        parent.wait(60)
    psutil.wait_procs(family, timeout=60)
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_what_is_still_compiling_ends_with_the_engines_process(model, tmp_path):
    script = SERVE.replace("assert llm.engine.runner.compiled", "assert not llm.engine.runner.compiled")
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", script, str(model)], env=env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    time.sleep(0.2)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
