"""The warning about an option that is slower than the default. The clock is replaced: no test depends on time."""

import logging

import pytest
import torch
from helpers import tiny_model

from nanopage.build import build_engine
from nanopage.config.options import EngineConfig
from nanopage.cpu import option_speed
from nanopage.cpu.packed import PackedWeight
from nanopage.cpu.tiled import TiledWeight

MILLISECOND = 0.001


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def warnings_of(model, monkeypatch, caplog, slowness, **options):
    """What an engine with these options warns of. slowness: number of tokens -> times the default."""
    measured = []

    def seconds(module, x):
        measured.append((type(module.weight), x.dtype, len(x)))
        return MILLISECOND * (1 if isinstance(module.weight, PackedWeight) else slowness[len(x)])

    monkeypatch.setattr(option_speed, "_seconds", seconds)
    config = EngineConfig(model=str(model), num_gpu_blocks_override=8, max_model_len=64, enforce_eager=True, **options)
    with caplog.at_level(logging.WARNING, "nanopage"):
        build_engine(config)
    return [record.message for record in caplog.records], measured


def test_a_slow_quantization_is_named_with_its_ratios(model, monkeypatch, caplog):
    messages, measured = warnings_of(model, monkeypatch, caplog, {1: 3.14, 64: 0.5}, quantization="int8")
    assert messages == [
        "quantization='int8' with enforce_eager=True is slower than the default on this CPU: its largest product takes "
        "3.1 times as long for 1 token"
    ]
    default = torch.float32  # the tiny model's
    assert {(kind, dtype) for kind, dtype, _ in measured} == {(TiledWeight, default), (PackedWeight, default)}


def test_what_is_about_as_fast_is_not_worth_a_line(model, monkeypatch, caplog):
    messages, measured = warnings_of(model, monkeypatch, caplog, {1: 1.2, 64: 1.0}, quantization="int4")
    assert messages == [] and len(measured) == 4 * option_speed.REPEATS


def test_a_dtype_of_16_bits_that_the_checkpoint_does_not_have_is_measured(model, monkeypatch, caplog):
    messages, _ = warnings_of(model, monkeypatch, caplog, {1: 2.0, 64: 12.0}, dtype="float16")
    assert "dtype='float16' with enforce_eager=True is slower" in messages[0]
    assert "takes 2.0 times as long for 1 token and 12.0 times as long for 64 tokens" in messages[0]


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"dtype": "float64"}])
def test_a_dtype_for_precision_is_not_measured(model, monkeypatch, caplog, options):
    _, measured = warnings_of(model, monkeypatch, caplog, {1: 9.0, 64: 9.0}, **options)
    assert measured == []


def test_a_product_is_measured():
    assert 0 < option_speed._seconds(torch.nn.Linear(2, 2), torch.ones(1, 2)) < 60
