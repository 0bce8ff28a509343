"""`nanopage models`, `show`, `pull`, `rm` and `cache clean`, on caches in a directory of the test."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
from helpers import save_tokenizer
from typer.main import get_command

from nanopage.__main__ import app
from nanopage.terminal import models
from nanopage.weights import hub, inventory

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu"}
CONFIG |= {"max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
# Maps one file, opens another, works in a directory, and waits.
USER = """
import mmap, os, sys
mapped, opened, directory = sys.argv[1:]
file = open(opened)
with open(mapped, "rb") as other:
    memory = mmap.mmap(other.fileno(), 0, access=mmap.ACCESS_READ)
os.chdir(directory)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """The hub's cache, and nanopage's own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ours = tmp_path / "nanopage"
    for path in ("models", "compiled/abc", "compiled/def", "tiles"):
        (ours / path).mkdir(parents=True)
    return SimpleNamespace(hub=tmp_path / "hub", ours=ours)


def store(directory, size=1000, **fields):
    """Write a model's small files, and weights that are none. Returns the directory."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | fields))
    save_tokenizer(directory)
    with open(directory / "model.safetensors", "wb") as file:
        file.truncate(size)
    return directory


def download(caches, owner, name, **options):
    """A model in the hub's cache, with two revisions and blobs that both link to. Returns its directory there."""
    root = caches.hub / f"models--{owner}--{name}"
    old, new = root / "snapshots" / "0", store(root / "snapshots" / "1", **options)
    (root / "blobs").mkdir()
    (new / "model.safetensors").rename(root / "blobs" / "weights")
    old.mkdir()
    for snapshot in (old, new):
        (snapshot / "model.safetensors").symlink_to("../../blobs/weights")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("1")
    return root


@pytest.fixture
def run(capsys):
    def call(*arguments):
        """(exit code, stdout, stderr)"""
        with pytest.raises(SystemExit) as end:
            get_command(app).main([*arguments], "nanopage")
        return end.value.code, *capsys.readouterr()

    return call


def test_models_are_listed_by_the_names_that_are_enough(caches, run):
    download(caches, "one", "Same")
    download(caches, "two", "same", quantization_config=AWQ)
    download(caches, "three", "Other", size=2_500_000_000, architectures=["NobodysForCausalLM"])
    download(caches, "HuggingFaceTB", "SmolLM2-135M-Instruct")
    store(caches.ours / "models" / "SmolLM2-135M-Instruct", size=3_000_000)
    (caches.ours / "models" / "SmolLM2-135M-Instruct.lock").touch()
    (caches.hub / "datasets--one--two" / "snapshots").mkdir(parents=True)
    (caches.ours / "compiled" / "abc" / "layer.so").write_bytes(bytes(4_000_000))
    code, out, err = run("models")
    rows = [line.split() for line in out.splitlines()]
    today = time.strftime("%Y-%m-%d")
    assert code == 0 and [row[0] for row in rows[1:]] == [
        *("HuggingFaceTB/SmolLM2-135M-Instruct", "one/Same", "Other", "SmolLM2-135M-Instruct", "two/same"),
    ]
    assert rows[3][1:] == ["2.5", "GB", "-", "-", "-", today]
    assert rows[4][1:3] == ["3.0", "MB"] and rows[5][3:] == ["4,096", "awq", "yes", today]
    assert "besides, 4.0 MB of compiled code" in err
    code, out, _ = run("models", "--json")
    listed = json.loads(out)
    assert code == 0 and [each["name"] for each in listed["models"]] == [row[0] for row in rows[1:]]
    assert [each["kind"] for each in listed["can_be_made_again"]] == ["compiled code"] * 2
    one = listed["models"][1]
    assert one["path"] == str(caches.hub / "models--one--Same") and one["directory"] == f"{one['path']}/snapshots/1"
    expected = {"dtype": "bfloat16", "quantization": None, "context": 4096, "chat_template": True, "problem": None}
    assert {name: one[name] for name in expected} == expected and one["num_bytes"] > 1000

    code, out, _ = run("show", "other", "--json")
    assert code == 0 and json.loads(out) == listed["models"][2]
    assert "NobodysForCausalLM" in json.loads(out)["problem"]
    code, out, _ = run("show", "two/same")
    assert code == 0 and "quantization   awq" in out and "context        4,096" in out
    code, out, _ = run("show", str(store(caches.hub / "elsewhere")))
    assert code == 0 and "elsewhere" in out
    for name, message in (("same", "one of one/Same, two/same"), ("nothing", "no model 'nothing' in the caches")):
        code, out, err = run("show", name)
        assert (code, out) == (1, "") and message in err


def test_a_short_name_is_a_model(caches, monkeypatch):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **_: asked.append(model) or "/somewhere")
    root = download(caches, "one", "Same")
    for name in ("Same", "same", "one/Same", "else/where"):
        hub.resolve(name)
    assert asked == ["one/Same", "one/Same", "one/Same", "else/where"]
    store(root.parent.parent / "same")
    assert str(hub.resolve("same")) == "same"  # a directory wins
    download(caches, "two", "same")
    with pytest.raises(FileNotFoundError, match="'Same' is the name of several downloaded models, so give one of one/"):
        hub.resolve("Same")
    with pytest.raises(FileNotFoundError, match="a name that `nanopage models` shows"):
        hub.resolve("nothing")


def test_pull_downloads_and_says_where(caches, run, monkeypatch):
    monkeypatch.setattr(hub, "_from_hub", lambda model: f"/hub/{model}")
    assert run("pull", "one/two")[:2] == (0, "/hub/one/two\n")
    code, out, err = run("pull", str(caches.hub.parent))
    assert (code, out) == (2, "") and "is on this disk already" in err


@pytest.fixture
def used(caches):
    """Files that a process uses: mapped, open, and the directory it works in."""
    mapped = download(caches, "one", "mapped") / "blobs" / "weights"
    opened = caches.ours / "compiled" / "abc" / "lock"
    opened.touch()
    working = caches.ours / "models" / ".made"
    working.mkdir()
    command = [sys.executable, "-S", "-c", USER, mapped, opened, working]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield mapped, opened, working
        process.stdin.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_a_process_uses_stays(caches, run, used, monkeypatch):
    free = download(caches, "two", "free")
    (caches.hub / ".locks" / free.name).mkdir(parents=True)
    (free / "blobs" / "x.incomplete").touch()
    (caches.ours / "models" / "whisper-abc").mkdir()
    for name in ("a-b.safetensors", "a-b.lock"):
        (caches.ours / "tiles" / name).touch()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    code, out, err = run("rm", "free")
    assert code == 2 and str(free) in out and "give --yes" in err
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    questions = []
    monkeypatch.setattr(models.typer, "confirm", lambda question, err: questions.append(question))
    code, out, err = run("cache", "clean")
    assert code == 0 and "nothing was removed" in err and len(questions) == 1
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        *["compiled code"] * 2, "repacked weights", "converted model", "unfinished model", "unfinished download"
    ]  # fmt: skip
    assert [line.endswith("in use: stays") for line in out.splitlines()] == [True, False, False, False, True, False]

    code, out, err = run("cache", "clean", "--yes")
    assert code == 0 and "removed 0.0 MB" in err and len(questions) == 1
    assert os.listdir(caches.ours / "compiled") == ["abc"] and os.listdir(caches.ours / "tiles") == ["a-b.lock"]
    assert used[2].exists() and os.listdir(free / "blobs") == ["weights"]
    code, out, _ = run("rm", "mapped", "two/free", "free", "--yes")
    assert code == 1 and len(out.splitlines()) == 2 and out.count("in use: stays") == 1
    assert used[0].exists() and [path.name for path in caches.hub.glob("**/models--*")] == ["models--one--mapped"]
    assert run("rm", "mapped", "--yes")[2] == "nothing to remove\n"
    monkeypatch.setattr(inventory, "used_paths", lambda: {str(caches.hub)})  # a directory above
    assert run("rm", "mapped", "--yes")[0] == 0 and not used[0].exists()
