"""Whisper in CTranslate2's format: the tensors of transformers, and files that are broken."""

import json
import shutil
import struct

import numpy as np
import pytest
from helpers import tiny_whisper
from safetensors.torch import load_file
from transformers import WhisperForConditionalGeneration

from nanopage.quantization.ctranslate2 import (
    DTYPES,
    KINDS,
    LAYERS,
    PLACES,
    convert_whisper,
    read_variables,
    whisper_tensors,
)
from nanopage.weights import hub, loader

SETTINGS = {"decoder/num_heads": (4, "<i2"), "encoder/num_heads": (2, "<i2"), "decoder/activation": (3, "<i1")}
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>")


def text(value):
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def variable(name, array):
    kind = next(kind for kind, dtype in DTYPES.items() if dtype == array.dtype.str.replace("|", "<"))
    shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
    return text(name) + shape + struct.pack("<BI", kind, array.nbytes) + array.tobytes()


def variables_of(hf_model):
    """The variables that CTranslate2's converter makes of a model."""
    tensors = {name: tensor.detach().half().numpy() for name, tensor in hf_model.state_dict().items()}
    found = {name: np.array(value, dtype) for name, (value, dtype) in SETTINGS.items()}
    found["decoder/alignment_heads"] = np.array([1, 0], "<i2")
    layers = [(part, f"layer_{index}/", f"layers.{index}.") for part in ("encoder", "decoder") for index in range(2)]
    for part, there, here in [*layers, ("encoder", "", ""), ("decoder", "", "")]:
        for place, names in (LAYERS if there else PLACES).items():
            for kind, usual in KINDS.items():
                parts = [f"model.{part}.{here}{name}.{usual}" for name in names.split()]
                known = [tensors[name] for name in parts if name in tensors]
                if (
                    not known
                    or (kind in ("gamma", "beta")) != place.endswith("norm")
                    or (kind == "encodings") != ("position" in place)
                ):
                    continue
                arrays = [tensors.get(name, np.zeros_like(known[-1])) for name in parts]
                found[f"{part}/{there}{place}/{kind}"] = np.concatenate(arrays)
    return found


def model_bin(variables):
    aliases = struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")
    header = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    return header + b"".join(variable(*named) for named in variables.items()) + aliases


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory as faster-whisper has it, and the model in it."""
    directory, hf_model = tmp_path_factory.mktemp("ct2"), tiny_whisper(decoder_layers=2)
    (directory / "model.bin").write_bytes(model_bin(variables_of(hf_model)))
    tokens = [{"content": name, "id": 290 + index} for index, name in enumerate(SPECIAL)]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    config = {"suppress_ids": [1, 2], "suppress_ids_begin": [7], "alignment_heads": [[1, 0]]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, hf_model


def test_the_directory_has_the_tensors_and_sizes_of_the_model(made, tmp_path):
    source, hf_model = made
    convert_whisper(source, tmp_path / "made")
    written = load_file(tmp_path / "made" / "model.safetensors")
    wanted = {name: tensor.half() for name, tensor in hf_model.state_dict().items() if name != "proj_out.weight"}
    assert written.keys() == wanted.keys()
    assert all((written[name] == tensor).all() for name, tensor in wanted.items())
    read = WhisperForConditionalGeneration.from_pretrained(tmp_path / "made")
    for name in ("encoder_attention_heads", "decoder_attention_heads", "decoder_ffn_dim", "num_mel_bins", "vocab_size"):
        assert getattr(read.config, name) == getattr(hf_model.config, name), name
    assert read.generation_config.suppress_tokens == [1, 2]
    assert read.generation_config.no_timestamps_token_id == 292


def test_matrices_of_int8_are_divided_by_their_scales(made, tmp_path):
    """As CTranslate2's converter rounds them: matrices and convolutions, but no biases, norms and positions."""
    floats, variables = variables_of(made[1]), {}
    for name, array in floats.items():
        variables[name] = array
        if array.ndim > 1 and name.endswith("weight"):
            most = np.abs(array.reshape(len(array), -1)).max(1)
            scales = (127 / np.where(most == 0, 127, most)).astype("<f4")
            shape = (-1,) + (1,) * (array.ndim - 1)
            variables[name] = np.rint(array * scales.reshape(shape)).astype("<i1")
            variables[f"{name}_scale"] = scales
    (tmp_path / "model.bin").write_bytes(model_bin(variables))
    (tmp_path / "float.bin").write_bytes(model_bin(floats))
    read, exact = whisper_tensors(tmp_path / "model.bin"), whisper_tensors(tmp_path / "float.bin")
    assert read[1] == exact[1] and read[0].keys() == exact[0].keys()
    for name, tensor in exact[0].items():
        assert read[0][name].dtype == np.float16, name
        error = np.abs(read[0][name].astype(np.float32) - tensor).max() / np.abs(tensor).max()
        assert error < 1 / 230 if tensor.ndim > 1 and "positions" not in name else error == 0, name


def test_a_file_that_ends_early_is_an_error_wherever_it_ends(made, tmp_path):
    data, file = (made[0] / "model.bin").read_bytes(), tmp_path / "model.bin"
    for length in [*range(60), *range(60, len(data) - 200, len(data) // 50)]:
        file.write_bytes(data[:length])
        with pytest.raises(ValueError, match="it ends within") as caught:
            read_variables(file)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<I", 5) + text("WhisperSpec"), "its version is 5; supported: 6"),
        (
            struct.pack("<I", 6) + text("TransformerSpec") + struct.pack("<I", 7),
            "it is a 'TransformerSpec' of revision 7",
        ),
        (struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, 2**32 - 1), "4,294,967,295 variables"),
        (text("a") + struct.pack("<B255I", 255, *[2**32 - 1] * 255), "variable 'a' has 255 dimensions"),
        (text("a") + struct.pack("<B8IBI", 8, *[2**32 - 1] * 8, 0, 64), "but 64 bytes"),
        (text("a") + struct.pack("<BIBI", 1, 2**30 - 1, 0, 2**32 - 4), "it ends within variable 'a'"),
        (text("a") + struct.pack("<BIBI", 1, 1, 5, 4), "variable 'a' has the type bfloat16"),
        (variable("a", np.zeros(2, "<f4")) * 2, "variable 'a' occurs twice"),
    ],
    ids=str,
)
def test_what_a_file_may_not_say(tmp_path, data, words):
    if not data.startswith(b"\x05") and not data.startswith(b"\x06"):
        data = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, 2) + data
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        read_variables(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder/activation": np.array(0, "<i1")}, "'decoder/activation' is 0, and Whisper's is 3"),
        ({"decoder/extra/weight": np.zeros((2, 2), "<f2")}, "'decoder/extra/weight' is not part of Whisper"),
        (
            {"decoder/embeddings/weight": np.zeros((2, 2), "<i2")},
            "weight' is int16; supported: float32, float16",
        ),
        (
            {"decoder/embeddings/weight": np.zeros((2, 2), "<i1")},
            "is int8; supported: .* with a scale for each row",
        ),
        ({"decoder/embeddings/weight_scale": np.ones(2, "<f4")}, "'decoder/embeddings/weight_scale' is not part"),
        (
            {
                "decoder/embeddings/weight": np.zeros((2, 2), "<i1"),
                "decoder/embeddings/weight_scale": np.zeros(2, "<f4"),
            },
            "has scales that are not above 0",
        ),
        ({"encoder/layer_0/self_attention/linear_0/bias": np.zeros(4, "<f2")}, r"has the shape \[4\]"),
        ({"decoder/embeddings/weight": np.zeros(4, "<f2")}, "too few dimensions"),
        ({"decoder/num_heads": None}, "lacks 'decoder'"),
        ({"encoder/conv1/weight": None}, "lacks 'model.encoder.conv1.weight'"),
    ],
    ids=str,
)
def test_a_model_that_is_not_whisper_is_refused_by_name(made, tmp_path, changes, words):
    variables = variables_of(made[1]) | changes
    data = model_bin({name: array for name, array in variables.items() if array is not None})
    (tmp_path / "model.bin").write_bytes(data)
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((made[0] / name).read_bytes())
    with pytest.raises(ValueError, match=words):
        convert_whisper(tmp_path, tmp_path / "made")


def test_the_name_of_a_model_that_a_wheel_carries_is_its_converted_directory(made, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "_download", lambda model, scratch, progress: made[0])
    directory = hub.resolve("Whisper-Tiny.en")
    assert directory == tmp_path / "nanopage" / "models" / "whisper-tiny.en"
    assert hub.name_of("Whisper-Tiny.en") == hub.name_of(str(directory)) == directory.name
    assert hub.find_damage(directory) is None
    assert loader.read_config(directory).num_layers == 4
    monkeypatch.setattr(hub, "_download", None)
    assert hub.resolve("whisper-tiny.en") == directory


def test_a_directory_in_this_format_is_a_model(made, tmp_path, monkeypatch):
    """It is converted on first use, and again when a file in it has changed. What config.json lacks is left out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "faster-whisper-tiny"
    shutil.copytree(made[0], source)
    (source / "config.json").write_text("{}")
    directory = hub.resolve(str(source))
    assert directory.parent == tmp_path / "nanopage" / "models" and hub.name_of(str(source)) == source.name
    assert loader.read_config(directory).num_layers == 4 and hub.find_damage(directory) is None
    assert "alignment_heads" not in json.loads((directory / "generation_config.json").read_text())
    (source / "config.json").write_bytes((made[0] / "config.json").read_bytes())
    again = hub.resolve(str(source))
    assert again != directory
    monkeypatch.setattr(hub, "_make", None)
    assert hub.resolve(str(source)) == again
    (source / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"faster-whisper-tiny/tokenizer\.json"):
        hub.resolve(str(source))
