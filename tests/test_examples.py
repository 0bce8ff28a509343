"""The examples run, and the engine in one file gives the answers of the whole engine."""

import ast
import importlib.util
import random
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import LONG, VOCAB_SIZE, tiny_model

from nanopage import LLM, SamplingParams
from nanopage.cpu import aot
from nanopage.weights import hub

ROOT = Path(__file__).parent.parent
MINIMAL = ROOT / "examples" / "minimal_engine.py"
EXPECTED = {  # a part of what each example prints
    "completions": "beam 2: ",
    "offline": "Paris",
    "prefix_sharing": "prompt tokens were cached",
    "sampling": "digits only: ",
    "streaming": "\n",
}


@pytest.fixture(scope="module")
def minimal():
    spec = importlib.util.spec_from_file_location("minimal_engine", MINIMAL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(4))
def test_the_engine_in_one_file_gives_the_answers_of_the_whole_engine(minimal, tmp_path, seed):
    rng = random.Random(seed)
    model = tiny_model(tmp_path, tie_word_embeddings=seed % 2 == 0, num_key_value_heads=1 + seed % 2)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(6)]
    engine = minimal.Engine(
        model,
        num_blocks=rng.randint(20, 24),
        block_size=rng.choice([2, 3]),
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([5, 16]),
        dtype=torch.float64,
    )
    free = len(engine.block_manager.free_blocks)
    answers = engine.generate(prompts, max_tokens=10)
    assert engine.scheduler.num_preemptions > 0
    assert len(engine.block_manager.free_blocks) == free
    llm = LLM(str(model), dtype="float64", device="cpu", enforce_eager=True, max_model_len=64)
    whole = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert answers == [output.outputs[0].token_ids for output in whole]


def test_the_engine_in_one_file_refuses_what_it_cannot_run(minimal, tmp_path):
    model = tiny_model(tmp_path / "llama")
    engine = minimal.Engine(model, num_blocks=4, block_size=4)
    for prompt in ([], [3] * 15):
        with pytest.raises(ValueError, match="1 to 16 tokens"):
            engine.add("long", prompt, max_tokens=2)
    with pytest.raises(ValueError, match="Llama"):
        minimal.Engine(tiny_model(tmp_path / "qwen", "qwen3"))


def test_the_engine_in_one_file_names_files_that_exist_and_imports_only_tokenizer_and_weights():
    source = MINIMAL.read_text()
    assert len(source.splitlines()) <= 350
    headers = re.findall(r"^# --- .* -+ nanopage/(.*) ---$", source, re.MULTILINE)
    assert len(headers) == 5
    for file in ", ".join(headers).split(", "):
        assert (ROOT / "nanopage" / file).exists(), file
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = {node.module for node in imports if node.module.startswith("nanopage")}
    assert ours == {"nanopage.text.tokenizer", "nanopage.weights"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What is the default model to most examples, without NANOPAGE_LONG_TESTS=1."""
    return tiny_model(tmp_path_factory.mktemp("small"), max_position_embeddings=4096)


# test_course.py runs the engine in one file, and compares what it prints.
@pytest.mark.parametrize("example", sorted({*(ROOT / "examples").glob("*.py")} - {MINIMAL}), ids=lambda path: path.name)
def test_an_example_runs(example, small, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(example)])
    if example.stem != "offline" and not LONG:
        monkeypatch.setattr(hub, "default_model", lambda: small)
    monkeypatch.setattr(aot.Compiled, "start", lambda self: None)  # compiling in the background is not what is tested
    runpy.run_path(str(example), run_name="__main__")
    assert EXPECTED[example.stem] in capsys.readouterr().out
