"""bench.py compile: the parts of a CPU, the pieces of a GPU without having one."""

import json

import pytest
import torch
from helpers import LONG, run_bench

from benchmarks import compile_parts


@pytest.mark.skipif(not LONG, reason="compiles for 13 s; runs with NANOPAGE_LONG_TESTS=1")
def test_parts_for_a_cpu_are_compiled_and_loaded(model, tmp_path, monkeypatch):
    monkeypatch.delenv("NANOPAGE_COMPILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "result.json"
    done = run_bench("compile", "--model", model, "--device", "cpu", "--dtype", "float32", "--json", file)
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["complete"] is True and "compile" in result["header"]["bench"]
    assert 0 < result["seconds_before"] < result["seconds"]
    chain, *others = result["parts"]
    assert chain["part"] == "chain" and chain["compiler"] == chain["seconds"] > 0
    assert all(part["megabytes"] > 0 and part["load_ms"] > 0 for part in result["parts"])
    assert len(others) == 5
    for part in others:
        phases = [part[name] for name in ("export", "inductor", "compiler")]
        assert min(phases) > 0 and sum(phases) == pytest.approx(part["seconds"])
    compiled = tmp_path / "nanopage" / "compiled"
    assert not compiled.exists() or not list(compiled.glob("*/*.so")), "the user's cache is left alone"


def kinds_of(piece):
    return [name.rpartition(".")[0] for name in piece["launches"]]


@pytest.mark.skipif(not LONG, reason="Inductor compiles for 20 s; runs with NANOPAGE_LONG_TESTS=1")
def test_pieces_for_a_gpu_are_counted_without_one(model, tmp_path, monkeypatch):
    families = (("Qwen3-0.6B", "int8"), ("gemma-3-270m", None), ("Mixtral-8x7B", None))
    monkeypatch.setattr(compile_parts, "FAMILIES", families)
    file = tmp_path / "result.json"
    done = run_bench("compile", "--model", model, "--device", "cuda", "--dtype", "bfloat16", "--json", file)
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    by_piece = {(piece["piece"], piece["tokens"]): piece for piece in result["pieces"]}
    names = ("first", "between", "last", "head", "sampler")
    assert set(by_piece) == {(name, tokens) for name in names for tokens in (32, 1)}
    assert all(piece["size"] > 1000 and piece["seconds"] > 0 for piece in result["pieces"])
    for tokens in (32, 1):  # addmm would copy the residual first
        piece = by_piece["between", tokens]
        assert piece["launches"][::2] == 4 * ["extern_kernels.mm"] and kinds_of(piece)[1::2] == 3 * [""]
    assert "floor_kernel_0" in by_piece["sampler", 1]["launches"]
    assert len(result["families"]) == 2 * len(families)
    for piece in result["families"]:
        kinds, inside = kinds_of(piece), piece["inside"]
        if piece["quantization"] == "int8":  # products are split, and sums of splits added and rounded
            assert kinds.count("torch.ops.nanopage") == 4 and kinds.count("") == 3 and inside == 4 * 3
        elif piece["family"] == "Mixtral-8x7B":
            assert piece["launches"].count("torch.ops.nanopage.grouped_experts") == 1 and inside > 20
        else:
            assert kinds.count("extern_kernels") == 4 and kinds.count("") == 3 and inside == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="an engine would start")
def test_compile_refuses_what_is_not_compiled(model, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_parts, "run_module", lambda *_: pytest.fail("something is compiled"))
    done = run_bench("compile", "--model", model, "--device", "cpu")  # NANOPAGE_COMPILE is never
    assert done.exit_code == 1 and "NANOPAGE_COMPILE=never" in done.output
    assert run_bench("compile", "--model", model, "--quantization", "int3").exit_code == 2
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 64}
    stored = tmp_path / "awq"
    stored.mkdir()
    (stored / "config.json").write_text(json.dumps(config))
    done = run_bench("compile", "--model", stored, "--device", "cuda")
    assert done.exit_code == 2 and "floats" in done.output
