"""`python -m benchmarks.formats`: what it measures, on a tiny model."""

import json

from helpers import tiny_model
from typer.testing import CliRunner

from benchmarks import formats
from nanopage import LLM


def test_each_format_is_written_and_measured(tmp_path, monkeypatch):
    """Without compiling."""
    model, results = tiny_model(tmp_path / "model", dtype="bfloat16", hidden_size=128), tmp_path / "results.json"
    monkeypatch.setattr("nanopage.worker.executor.LocalExecutor.compile", lambda self: None)
    monkeypatch.setattr(formats, "LLM", lambda *args, **options: LLM(*args, **options | {"enforce_eager": True}))
    names = "fp8, blocks;nvfp4 of ModelOpt"
    command = ["--model", model, "--formats", names, "--num-tokens", 512, "--output-len", 8, "--json", results]
    app = formats.typer.Typer()
    app.command()(formats.main)
    done = CliRunner().invoke(app, [*map(str, command), "--num-iters", "1"])
    assert done.exit_code == 0, done.output
    found = json.loads(results.read_text())["formats"]
    assert list(found) == ["floats", "quantization=int8", "quantization=int4", *names.split(";")]
    assert all(float(value) > 0 for figures in found.values() for value in figures.values())
    assert found["nvfp4 of ModelOpt"]["disk_mb"] < found["fp8, blocks"]["disk_mb"] < found["floats"]["disk_mb"]
    assert "nvfp4 of ModelOpt" in done.output and "decode tok/s" in done.output
    assert CliRunner().invoke(app, ["--formats", "int5"]).exit_code == 2
