"""Weights from safetensors into modules, and every way they may not fit."""

import json
import os
import pickle

import pytest
import torch
from helpers import tiny_hf_model, tiny_model
from safetensors.torch import load_file, save_file

from nanopage.checks.fields import MAX_SIZES
from nanopage.files import safetensors_checkpoint
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj.weight"
POSITIONS = ("max_position_embeddings", "sliding_window")  # sizes that no weight has


@pytest.fixture
def model_dir(tmp_path):
    return tiny_model(tmp_path / "model")


def load(directory, dtype=torch.float32):
    return loader.load_model(directory, loader.read_config(directory), dtype, CPU)


def read_weights(directory):
    return load_file(directory / "model.safetensors")


def write_weights(directory, weights):
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def change(directory, **tensors):
    """Replace tensors of the checkpoint, or drop those that are None; `__` in a name stands for a dot."""
    weights = read_weights(directory)
    for name, tensor in tensors.items():
        if tensor is None:
            del weights[name.replace("__", ".")]
        else:
            weights[name.replace("__", ".")] = tensor
    write_weights(directory, weights)


def rewrite_header(file, change=dict, change_text=str):
    """Write a safetensors file again with another header."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = change_text(json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def set_config(directory, **fields):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def assert_holds(model, weights):
    """Every tensor of the checkpoint is where transformers' module of the same name has it."""
    found = loader.slots(model)
    found.setdefault("lm_head.weight", model.embed_tokens.weight.matrix)
    weights = dict(weights)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("mistral", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True}),
]
BY_FAMILY = pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=lambda value: str(value))


@BY_FAMILY
def test_a_single_file_fills_every_parameter(tmp_path, family, overrides):
    tiny_model(tmp_path, family, **overrides)
    assert_holds(load(tmp_path), read_weights(tmp_path))


@BY_FAMILY
def test_shards_fill_every_parameter(tmp_path, family, overrides):
    hf_model = tiny_hf_model(family, **overrides)
    hf_model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3
    weights = {}
    for shard in shards:
        weights |= load_file(shard)
    assert_holds(load(tmp_path), weights)


@pytest.mark.parametrize(
    ("failing", "names"),
    [
        ("nanopage.files.model_files.json.loads", "config.json: there is too little memory"),
        ("nanopage.files.safetensors_checkpoint.parse_json", "model.safetensors: there is too little memory"),
        ("nanopage.files.safetensors_checkpoint.bytearray", "model.safetensors: '.*weight': there"),
        ("nanopage.files.safetensors_checkpoint.read_into", "model.safetensors: there is too little memory"),
        ("nanopage.weights.loader.all_finite", "model: there is too little memory"),
        ("torch.empty", "model: .*you tried to allocate"),
    ],
)
def test_where_memory_runs_out_the_error_names_the_file(model_dir, monkeypatch, failing, names):
    empty, plain = torch.empty, bytearray

    def fail(*args, **options):
        if failing == "torch.empty":
            return empty(2**60 if options.get("device") == CPU else args[0], *args[1:], **options)
        if failing.endswith("bytearray") and args[0] == 1:
            return plain(1)
        raise MemoryError

    monkeypatch.setattr(safetensors_checkpoint, "PIECE_BYTES", 1)  # any row needs a larger buffer
    monkeypatch.setattr(failing, fail, raising=not failing.endswith("bytearray"))
    with pytest.raises(MemoryError, match=names):
        load(model_dir)


def test_q_k_v_and_gate_up_are_fused_in_that_order(model_dir):
    model, weights = load(model_dir), read_weights(model_dir)
    for index, layer in enumerate(model.layers):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        qkv = torch.cat([weights[f"{attention}{part}_proj.weight"] for part in "qkv"])
        gate_up = torch.cat([weights[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(layer.self_attn.qkv_proj.weight.matrix, qkv)
        assert torch.equal(layer.mlp.gate_up_proj.weight.matrix, gate_up)


def test_biases_are_fused_like_their_weights(tmp_path):
    tiny_model(tmp_path, "qwen2")
    model, weights = load(tmp_path), read_weights(tmp_path)
    for index, layer in enumerate(model.layers):
        parts = [weights[f"model.layers.{index}.self_attn.{part}_proj.bias"] for part in "qkv"]
        assert torch.equal(layer.self_attn.qkv_proj.bias, torch.cat(parts))


def test_loaded_models_are_in_eval_mode_and_need_no_gradients(model_dir):
    model = load(model_dir)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


class TestTiedHead:
    @pytest.fixture
    def tied_dir(self, tmp_path):
        return tiny_model(tmp_path / "tied", tie_word_embeddings=True)

    def test_shares_the_embedding_if_the_checkpoint_has_no_head(self, tied_dir):
        assert "lm_head.weight" not in read_weights(tied_dir)
        model = load(tied_dir)
        assert model.lm_head.weight is model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight.matrix, read_weights(tied_dir)["model.embed_tokens.weight"])

    def test_accepts_a_head_that_repeats_the_embedding(self, tied_dir):
        change(tied_dir, lm_head__weight=read_weights(tied_dir)["model.embed_tokens.weight"].clone())
        model = load(tied_dir)
        assert model.lm_head.weight is model.embed_tokens.weight
        assert_holds(model, read_weights(tied_dir))

    def test_accepts_a_checkpoint_with_the_head_alone(self, tied_dir):
        embedding = read_weights(tied_dir)["model.embed_tokens.weight"]
        change(tied_dir, lm_head__weight=embedding.clone(), model__embed_tokens__weight=None)
        assert torch.equal(load(tied_dir).embed_tokens.weight.matrix, embedding)

    def test_refuses_a_head_that_differs(self, tied_dir):
        head = read_weights(tied_dir)["model.embed_tokens.weight"].clone()
        head[7, 3] += 1
        change(tied_dir, lm_head__weight=head)
        with pytest.raises(ValueError, match="tied, yet different") as caught:
            load(tied_dir)
        assert "lm_head.weight" in str(caught.value)
        assert "model.embed_tokens.weight" in str(caught.value)

    def test_compares_repeated_heads_after_conversion(self, tied_dir):
        change(tied_dir, lm_head__weight=read_weights(tied_dir)["model.embed_tokens.weight"].double())
        assert load(tied_dir, torch.bfloat16).lm_head.weight.matrix.dtype == torch.bfloat16

    def test_refuses_a_checkpoint_with_neither(self, tied_dir):
        change(tied_dir, model__embed_tokens__weight=None)
        with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
            load(tied_dir)

    def test_untied_models_need_both(self, model_dir):
        change(model_dir, lm_head__weight=None)
        with pytest.raises(ValueError, match=r"missing: lm_head\.weight") as caught:
            load(model_dir)
        assert "embed_tokens" not in str(caught.value)


class TestTensorsThatDoNotFit:
    @pytest.mark.parametrize(
        "name",
        [Q, "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"],
    )
    def test_a_missing_one_is_named(self, model_dir, name):
        change(model_dir, **{name: None})
        with pytest.raises(ValueError, match="missing") as caught:
            load(model_dir)
        assert f"missing: {name} " in str(caught.value)
        assert str(caught.value).count("\n") == 1

    def test_an_unexpected_one_is_named_with_its_shape(self, model_dir):
        change(model_dir, model__layers__2__mlp__up_proj__weight=torch.zeros(3, 5))
        with pytest.raises(ValueError, match=r"unexpected: model\.layers\.2\.mlp\.up_proj\.weight \[3, 5\]"):
            load(model_dir)

    def test_a_bias_that_the_configuration_does_not_have_is_unexpected(self, tmp_path):
        tiny_model(tmp_path, attention_bias=True)
        set_config(tmp_path, attention_bias=False)
        with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
            load(tmp_path)

    @pytest.mark.parametrize("shape", [[64, 63], [32, 64], [64], [64, 64, 1], [1, 64], []], ids=str)
    def test_a_mis_shaped_one_is_named_with_both_shapes(self, model_dir, shape):
        change(model_dir, **{Q: torch.zeros(shape)})
        with pytest.raises(ValueError, match="mis-shaped") as caught:
            load(model_dir)
        assert f"{Q} is {shape}, the model wants [64, 64]" in str(caught.value)
        assert "missing" not in str(caught.value)

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [
            (torch.int8, "I8"),
            (torch.uint8, "U8"),
            (torch.int64, "I64"),
            (torch.bool, "BOOL"),
            (torch.complex64, "C64"),
            (torch.float8_e4m3fn, "F8_E4M3"),  # it would need a scale
        ],
    )
    def test_one_of_another_type_is_named_with_its_type(self, model_dir, dtype, name):
        change(model_dir, **{Q: torch.zeros(64, 64).to(dtype)})
        with pytest.raises(ValueError, match="type not supported") as caught:
            load(model_dir)
        assert f"{Q} is {name}; supported: F64, F32, F16, BF16" in str(caught.value)

    def test_all_are_named_in_one_error(self, model_dir):
        change(
            model_dir,
            model__norm__weight=None,
            model__layers__0__mlp__gate_proj__weight=None,
            model__layers__0__mlp__down_proj__weight=torch.zeros(2, 2),
            model__layers__1__self_attn__k_proj__weight=torch.zeros(32, 64, dtype=torch.int64),
            model__layers__1__self_attn__k_proj__bias=torch.zeros(32),
            stranger=torch.zeros(1),
        )
        with pytest.raises(ValueError, match="do not fit") as caught:
            load(model_dir)
        _, *problems = str(caught.value).split("\n  ")
        assert sorted(problems) == [
            "mis-shaped: model.layers.0.mlp.down_proj.weight is [2, 2], the model wants [64, 96]",
            "missing: model.layers.0.mlp.gate_proj.weight [96, 64]",
            "missing: model.norm.weight [64]",
            "type not supported: model.layers.1.self_attn.k_proj.weight is I64; supported: F64, F32, F16, BF16",
            "unexpected: model.layers.1.self_attn.k_proj.bias [32]",
            "unexpected: stranger [1]",
        ]
        assert str(model_dir) in str(caught.value)

    def test_a_long_list_says_how_many_more(self, model_dir):
        change(model_dir, **{f"stranger{i:03}": torch.zeros(1) for i in range(61)})
        with pytest.raises(ValueError, match="and 11 more"):
            load(model_dir)

    @pytest.mark.parametrize("place", ["self_attn__", "self_attn__attn__", "self_attn__{}_proj__"])
    def test_scales_of_k_and_v_are_numbers_of_their_layer(self, model_dir, place):
        prefix = "model__layers__1__" + place
        change(
            model_dir,
            **{f"{prefix.format('k')}k_scale": torch.tensor(0.5), f"{prefix.format('v')}v_scale": torch.ones(1) * 3},
        )
        assert [layer.self_attn.scoring.kv_scales for layer in load(model_dir).layers] == [(1.0, 1.0), (0.5, 3.0)]

    @pytest.mark.parametrize(
        ("name", "scale", "error"),
        [
            ("model__layers__1__self_attn__k_scale", torch.tensor(0.0), "k_scale is 0.0: a scale must be"),
            ("model__layers__1__self_attn__v_scale", torch.tensor(torch.nan), "v_scale is nan: a scale must be"),
            ("model__layers__2__self_attn__k_scale", torch.tensor(1.0), "belongs to no layer: the model has 2"),
            ("model__layers__1__self_attn__k_scale", torch.ones(4), r"unexpected: .*k_scale \[4\]"),
            ("model__layers__1__self_attn__v_proj__k_scale", torch.tensor(1.0), "unexpected: .*v_proj.k_scale"),
        ],
    )
    def test_a_wrong_scale_of_k_or_v_is_named(self, model_dir, name, scale, error):
        change(model_dir, **{name: scale})
        with pytest.raises(ValueError, match=error):
            load(model_dir)

    def test_an_old_rotary_table_is_ignored(self, model_dir):
        change(
            model_dir,
            model__layers__0__self_attn__rotary_emb__inv_freq=torch.full((8,), torch.nan),
            model__layers__1__self_attn__rotary_emb__inv_freq=torch.full((8,), torch.nan),
        )
        weights = {name: tensor for name, tensor in read_weights(model_dir).items() if "inv_freq" not in name}
        assert_holds(load(model_dir), weights)

    def test_a_missing_layer_is_named_though_its_neighbour_is_there(self, model_dir):
        set_config(model_dir, num_hidden_layers=3)
        with pytest.raises(ValueError, match=r"missing: model\.layers\.2\.self_attn\.q_proj\.weight"):
            load(model_dir)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_type_asked_for(tmp_path, stored, wanted):
    tiny_model(tmp_path, dtype=stored)
    weights = read_weights(tmp_path)
    assert weights[Q].dtype == stored
    model = load(tmp_path, wanted)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert_holds(model, weights)


class TestSizesThatAreNotThoseOfTheFiles:
    """They are refused by the files' headers, before anything is allocated."""

    @pytest.fixture(autouse=True)
    def nothing_is_allocated(self, monkeypatch):
        def refuse(*args):
            raise AssertionError("weights were allocated")

        monkeypatch.setattr(loader, "materialize", refuse)

    @pytest.mark.parametrize("name", [name for name in MAX_SIZES if name not in POSITIONS])
    def test_a_size_as_large_as_config_json_may_have(self, model_dir, name):
        set_config(model_dir, num_key_value_heads=1)
        set_config(model_dir, **{name: MAX_SIZES[name]} | ({"num_attention_heads": 4096} if "heads" in name else {}))
        with pytest.raises(ValueError, match=r"do not fit its configuration:\n  (mis-shaped|missing): ") as caught:
            load(model_dir)
        assert len(str(caught.value)) < 10_000

    def test_all_of_them(self, model_dir):
        set_config(model_dir, **{name: MAX_SIZES[name] for name in MAX_SIZES if name not in POSITIONS})
        with pytest.raises(ValueError, match="mis-shaped"):
            load(model_dir)

    def test_a_file_with_nothing_in_it(self, model_dir):
        write_weights(model_dir, {})
        with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
            load(model_dir)


class TestMemory:
    @pytest.mark.parametrize("load_format", ["auto", "dummy"])
    def test_weights_that_do_not_fit_are_an_error_before_they_are_allocated(self, model_dir, monkeypatch, load_format):
        config = loader.read_config(model_dir)
        parameters = sum(parameter.numel() for parameter in loader.meta_model(config).parameters())
        for free, fits in ((4 * parameters, True), (4 * parameters - 1, False)):
            monkeypatch.setattr("nanopage.device.free_bytes", lambda device, free=free: free)
            if fits:
                loader.load_model(model_dir, config, torch.float32, CPU, loader.Loading(load_format))
                continue
            with pytest.raises(MemoryError, match=r"take 0\.00 GiB in float32, and 0\.00 GiB are free") as caught:
                loader.load_model(model_dir, config, torch.float32, CPU, loader.Loading(load_format))
            assert str(model_dir) in str(caught.value)
            loader.load_model(model_dir, config, torch.bfloat16, CPU, loader.Loading(load_format))

    def test_a_model_beyond_any_computer_is_an_error_that_says_its_size(self, model_dir):
        set_config(model_dir, **{name: MAX_SIZES[name] for name in MAX_SIZES if name not in POSITIONS})
        config = loader.read_config(model_dir)
        with pytest.raises(MemoryError, match=r"the weights take 70,287,362.00 GiB in float32, and [0-9.,]+ GiB are"):
            loader.load_model(model_dir, config, torch.float32, CPU, loader.Loading("dummy"))


class TestValuesThatAreNotFinite:
    @pytest.mark.parametrize(
        "name", ["model.norm.weight", Q, "model.layers.1.self_attn.v_proj.bias", "model.embed_tokens.weight"]
    )
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_are_an_error_that_names_file_and_tensor(self, tmp_path, name, value, dtype):
        tiny_model(tmp_path, "qwen2")
        tensor = read_weights(tmp_path)[name].clone()
        tensor.view(-1)[-2] = value
        change(tmp_path, **{name: tensor})
        with pytest.raises(ValueError, match="NaN or infinite") as caught:
            load(tmp_path, dtype)
        assert str(tmp_path / "model.safetensors") in str(caught.value)
        assert f"{name} has values" in str(caught.value)

    def test_appear_if_the_type_is_too_narrow(self, model_dir):
        weight = read_weights(model_dir)[Q].clone()
        weight[3, 4] = 1e5
        change(model_dir, **{Q: weight})
        load(model_dir, torch.bfloat16)
        with pytest.raises(ValueError, match="NaN or infinite in float16"):
            load(model_dir, torch.float16)

    def test_are_not_confused_with_a_sum_that_overflows(self, model_dir):
        change(model_dir, **{Q: torch.full((64, 64), 60000.0)})
        for dtype in (torch.float16, torch.float32):
            assert torch.isfinite(loader.slots(load(model_dir, dtype))[Q]).all()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_progress_is_reported_up_to_the_number_of_weights(model_dir, load_format):
    calls = []
    config = loader.read_config(model_dir)
    how = loader.Loading(load_format)
    model = loader.load_model(model_dir, config, torch.float32, CPU, how, lambda *now: calls.append(now))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert len(calls) == len(loader.slots(model))


class TestFiles:
    @pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
    @pytest.mark.parametrize("sharded", [False, True])
    def test_what_is_no_file_is_refused_by_name(self, model_dir, make, sharded):
        file = model_dir / "model.safetensors"
        file.unlink()
        make(file)
        if sharded:
            index = {"weight_map": {Q: file.name}}
            (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="is not a regular file") as caught:
            load(model_dir)
        assert str(file) in str(caught.value)

    @pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose reading fails")
    def test_a_file_that_cannot_be_read_is_named(self, model_dir):
        file = model_dir / "model.safetensors"
        file.unlink()
        file.symlink_to("/proc/self/mem")
        with pytest.raises(ValueError, match="not a readable safetensors file") as caught:
            load(model_dir)
        assert str(file) in str(caught.value)

    @pytest.mark.parametrize("size", [2**25 + 1, 2**40, 2**64 - 1])
    def test_a_header_that_would_take_much_memory_is_not_read(self, model_dir, size):
        file = model_dir / "model.safetensors"
        file.write_bytes(size.to_bytes(8, "little") + file.read_bytes()[8:])
        with pytest.raises(ValueError, match=rf"its header has {size:,} bytes") as caught:
            load(model_dir)
        assert str(file) in str(caught.value)

    @pytest.mark.parametrize("keep", [0, 4, 8, 200, 5_000, -1])
    def test_a_truncated_file_is_named(self, model_dir, keep):
        file = model_dir / "model.safetensors"
        os.truncate(file, keep if keep >= 0 else file.stat().st_size - 1)
        with pytest.raises(ValueError, match="truncated") as caught:
            load(model_dir)
        assert str(file) in str(caught.value)

    @pytest.mark.parametrize(
        ("shape", "problem"),
        [
            ([1] * 400_000, "400,000 dimensions"),
            ([2**62] * 400_000, "400,000 dimensions"),  # the product takes seconds
            ([2**62] * 8, "bytes of"),
            ([10**4000, 1], "sizes of"),
            ([-1, -1], "sizes of"),
            ([True, 1], "sizes of"),
            ([1.0, 1], "sizes of"),
            ([[1], 1], "sizes of"),
            ("11", "sizes of"),
            (7, "not iterable"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_a_shape_that_means_nothing_is_named(self, model_dir, shape, problem):
        file = model_dir / "model.safetensors"
        rewrite_header(file, lambda header: header[Q].update(shape=shape))
        with pytest.raises(ValueError, match=problem) as caught:
            load(model_dir)
        assert str(file) in str(caught.value)
        assert len(str(caught.value)) < 1000

    def test_a_tensor_that_occurs_twice_is_named(self, model_dir):
        file = model_dir / "model.safetensors"
        rewrite_header(file, change_text=lambda text: text.replace("input_layernorm", "post_attention_layernorm"))
        with pytest.raises(ValueError, match=r"post_attention_layernorm\.weight' occurs twice"):
            load(model_dir)

    @pytest.mark.parametrize(
        ("when", "how"),
        [("before its tensors", how) for how in ("cut", "emptied", "longer", "other names", "other sizes", "removed")]
        + [("among its tensors", how) for how in ("cut", "emptied", "longer", "written")],
    )
    def test_a_file_that_changes_while_it_is_read_is_an_error(self, model_dir, monkeypatch, when, how):
        """With a file that is mapped into memory, one that is cut would be SIGBUS."""
        file, changes = model_dir / "model.safetensors", []

        def change(*args):
            if not changes:
                changes.append(how)
                data = file.read_bytes()
                if how in ("cut", "emptied"):
                    os.truncate(file, 4096 if how == "cut" else 0)
                elif how == "longer":
                    file.write_bytes(data + b"x")
                elif how == "written":
                    file.write_bytes(data[:-1] + b"\0")
                    os.utime(file, (1, 1))
                elif how == "other names":
                    rewrite_header(file, change_text=lambda text: text.replace("norm", "mron"))
                elif how == "other sizes":
                    rewrite_header(file, lambda header: header[Q].update(shape=[1, *header[Q]["shape"]]))
                else:
                    file.unlink()
            return original(*args)

        module, name = (loader, "fill") if when == "before its tensors" else (safetensors_checkpoint, "read_into")
        original = getattr(module, name)
        monkeypatch.setattr(module, name, change)
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            load(model_dir)
        assert changes == [how] and str(file) in str(caught.value)

    @pytest.mark.parametrize("text", ["\x1b]0;title\x07", "\x9b2J", "\n\r", "\u202e", "\x00"], ids=ascii)
    @pytest.mark.parametrize("field", ["name", "dtype", "shape"])
    def test_what_a_header_says_does_not_reach_a_terminal_as_it_is(self, model_dir, text, field):
        values = {"dtype": text, "shape": {text: 1}}

        def change(header):
            if field == "name":
                header[text] = header.pop(Q)
            else:
                header[Q][field] = values[field]

        rewrite_header(model_dir / "model.safetensors", change)
        with pytest.raises(ValueError) as caught:
            load(model_dir)
        assert text not in str(caught.value)

    def test_a_file_that_is_something_else_is_named(self, model_dir):
        file = model_dir / "model.safetensors"
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456\n" * 5)
        with pytest.raises(ValueError, match="not a readable safetensors file") as caught:
            load(model_dir)
        assert str(file) in str(caught.value)

    def test_one_file_of_any_name_is_the_model(self, model_dir):
        (model_dir / "model.safetensors").rename(model_dir / "weights.safetensors")
        assert_holds(load(model_dir), load_file(model_dir / "weights.safetensors"))

    def test_model_safetensors_is_preferred_to_files_of_other_names(self, model_dir):
        save_file({"adapter": torch.zeros(1)}, model_dir / "adapter.safetensors")
        assert_holds(load(model_dir), read_weights(model_dir))

    def test_several_files_without_an_index_are_refused_and_named(self, model_dir):
        (model_dir / "model.safetensors").rename(model_dir / "a.safetensors")
        save_file({"adapter": torch.zeros(1)}, model_dir / "b.safetensors")
        with pytest.raises(ValueError, match=r"\(a\.safetensors, b\.safetensors\): it needs model\.saf.*\.index\.json"):
            load(model_dir)

    def test_a_directory_without_weights_is_refused(self, model_dir):
        (model_dir / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"has no \.safetensors weights") as caught:
            load(model_dir)
        assert str(model_dir) in str(caught.value)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
    def test_pickled_weights_are_refused_and_never_loaded(self, model_dir, tmp_path, name):
        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "exploded"),)

        torch.save({Q: torch.zeros(64, 64)}, model_dir / name)
        (model_dir / name).write_bytes(pickle.dumps(Bomb()))
        (model_dir / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="can run code") as caught:
            load(model_dir)
        assert name in str(caught.value)
        assert not (tmp_path / "exploded").exists()

    def test_pickled_weights_beside_safetensors_are_left_alone(self, model_dir):
        (model_dir / "pytorch_model.bin").write_bytes(b"not even a pickle")
        assert_holds(load(model_dir), read_weights(model_dir))


class TestIndex:
    @pytest.fixture
    def sharded_dir(self, tmp_path):
        directory = tmp_path / "sharded"
        tiny_hf_model().save_pretrained(directory, max_shard_size="60KB")
        return directory

    def edit(self, directory, edit):
        file = directory / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        edit(index)
        file.write_text(json.dumps(index))

    def test_a_missing_shard_is_named(self, sharded_dir):
        gone = sorted(sharded_dir.glob("model-*.safetensors"))[1:3]
        for shard in gone:
            shard.unlink()
        with pytest.raises(ValueError, match="not there") as caught:
            load(sharded_dir)
        assert all(shard.name in str(caught.value) for shard in gone)

    def test_a_truncated_shard_is_named(self, sharded_dir):
        shard = sorted(sharded_dir.glob("model-*.safetensors"))[2]
        os.truncate(shard, shard.stat().st_size - 1)
        with pytest.raises(ValueError, match="truncated") as caught:
            load(sharded_dir)
        assert str(shard) in str(caught.value)

    def test_an_index_that_leaves_a_shard_out_misses_its_tensors(self, sharded_dir):
        last = sorted(sharded_dir.glob("model-*.safetensors"))[-1]
        names = load_file(last).keys()
        self.edit(sharded_dir, lambda index: [index["weight_map"].pop(name) for name in names])
        with pytest.raises(ValueError, match="missing") as caught:
            load(sharded_dir)
        assert all(f"missing: {name} " in str(caught.value) for name in names)

    @pytest.mark.parametrize("kind", ["absolute", "parent", "subdirectory", "the parent itself", "empty"])
    def test_a_path_outside_the_directory_is_refused(self, sharded_dir, tmp_path, kind):
        save_file({"stranger": torch.zeros(1)}, tmp_path / "outside.safetensors")
        name = {
            "absolute": str(tmp_path / "outside.safetensors"),
            "parent": "../outside.safetensors",
            "subdirectory": "sub/outside.safetensors",
            "the parent itself": "..",
            "empty": "",
        }[kind]
        self.edit(sharded_dir, lambda index: index["weight_map"].update({Q: name}))
        with pytest.raises(ValueError, match="is not the plain name of a file") as caught:
            load(sharded_dir)
        assert repr(name) in str(caught.value)

    @pytest.mark.parametrize("value", [5, None, ["model-00001-of-00009.safetensors"]], ids=str)
    def test_a_file_name_that_is_no_string_is_refused(self, sharded_dir, value):
        self.edit(sharded_dir, lambda index: index["weight_map"].update({Q: value}))
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
            load(sharded_dir)

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{", "\xff"])
    def test_an_index_that_is_none_is_refused_and_named(self, sharded_dir, text):
        (sharded_dir / "model.safetensors.index.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
            load(sharded_dir)

    def test_the_index_wins_over_a_file_named_model_safetensors(self, sharded_dir):
        write_weights(sharded_dir, {"stranger": torch.zeros(1)})
        weights = {}
        for shard in sharded_dir.glob("model-*.safetensors"):
            weights |= load_file(shard)
        assert_holds(load(sharded_dir), weights)

    @pytest.mark.parametrize("difference", [0, 1])
    def test_a_tensor_that_two_shards_hold_is_refused(self, sharded_dir, difference):
        shards = sorted(sharded_dir.glob("model-*.safetensors"))
        weights = load_file(shards[-1])
        name = next(iter(load_file(shards[0])))
        save_file(weights | {name: load_file(shards[0])[name] + difference}, shards[-1])
        with pytest.raises(ValueError, match=f"in two files: {shards[0].name} and {shards[-1].name}") as caught:
            load(sharded_dir)
        assert repr(name) in str(caught.value)


class TestDummyWeights:
    @staticmethod
    def load(directory, dtype=torch.float32):
        return loader.load_model(directory, loader.read_config(directory), dtype, CPU, loader.Loading("dummy"))

    @BY_FAMILY
    def test_need_no_more_than_a_config_and_have_a_checkpoints_names_and_shapes(self, tmp_path, family, overrides):
        weights = read_weights(tiny_model(tmp_path / "whole", family, **overrides))
        (tmp_path / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
        config = loader.read_config(tmp_path)
        dummies = dict(loader.dummy_tensors(config, torch.float32, CPU))
        assert {name: tensor.shape for name, tensor in dummies.items()} == {n: t.shape for n, t in weights.items()}
        assert_holds(self.load(tmp_path), dummies)
        for name, tensor in dummies.items():
            if tensor.dim() == 2:
                assert tensor.std().item() == pytest.approx(0.02, rel=0.1), name
                assert abs(tensor.mean().item()) < 0.002, name
            else:
                assert torch.equal(tensor, torch.full_like(tensor, 0.0 if name.endswith("bias") else 1.0)), name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_are_the_same_at_every_call_and_leave_torchs_seed_alone(self, model_dir, dtype):
        config, state = loader.read_config(model_dir), torch.random.get_rng_state()
        first, again = (dict(loader.dummy_tensors(config, dtype, CPU)) for _ in range(2))
        assert all(tensor.dtype == dtype for tensor in first.values())
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first[Q], first[Q.replace("layers.0", "layers.1")])
        assert torch.equal(torch.random.get_rng_state(), state)

    def test_are_drawn_although_there_are_others(self, model_dir):
        assert not torch.equal(loader.slots(self.load(model_dir))[Q], read_weights(model_dir)[Q])
