"""What `batch_invariant` refuses. tests/test_fuzz.py checks what it promises."""

import pytest
from helpers import tiny_model

from nanopage import EngineConfig
from nanopage.build import build_engine


@pytest.mark.parametrize(
    "option",
    [
        {"enforce_eager": True},
        {"enable_lora": True},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
    ],
    ids=str,
)
def test_other_options_are_refused_by_name(option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"batch_invariant=True and {name}={value!r} exclude each other"):
        EngineConfig(batch_invariant=True, **option)


@pytest.mark.parametrize(
    ("family", "sizes", "options", "why"),
    [
        ("llama", {}, {"dtype": "float64"}, "float64 is not compiled on this CPU"),
        ("llama", {}, {"model_impl": "transformers"}, "transformers' own modules are not compiled"),
        ("mistral", {"sliding_window": 5}, {}, "layers have a window of 5 tokens, .*: max_model_len=5 works"),
        ("lfm2", {"layer_types": ["conv", "conv"], "num_hidden_layers": 2, "pad_token_id": None}, {}, "with a state"),
        ("deepseek_v3", {"moe_intermediate_size": 8}, {}, "latent attention"),
        ("gpt_oss", {"sliding_window": 7, "num_local_experts": 3}, {"max_model_len": 7}, "experts of this kind"),
        ("qwen2_moe", {}, {}, "gate of the expert"),
        ("qwen2", {}, {"runner": "pooling"}, "batch_invariant=True does not work with embeddings and scores"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_cannot_have_it_are_refused_before_they_are_loaded(tmp_path, family, sizes, options, why):
    model = tiny_model(tmp_path, family, **sizes)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"batch_invariant=True does not work with .*{why}|^{why}"):
        build_engine(EngineConfig(model=str(model), device="cpu", batch_invariant=True, **options))


def test_without_compiled_products_it_says_so(model, tmp_path, monkeypatch):
    """The tests set NANOPAGE_COMPILE=never."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="batch_invariant=True needs products that are compiled"):
        build_engine(EngineConfig(model=str(model), device="cpu", batch_invariant=True))
