"""What models that see images refuse: fields of their files, options, and data."""

import json

import pytest
from helpers import VOCAB_SIZE
from seeing import (
    IDEFICS_TOKENS,
    PREPROCESSOR,
    QWEN_TOKENS,
    TEXT,
    TOWER,
    gemma_model,
    idefics_model,
    picture,
    save_tokenizer,
)

from nanopage import LLM, EngineArgs
from nanopage.checks.fields import MAX_SIZES
from nanopage.config.options import EngineConfig
from nanopage.reading.config import config_from_dict
from nanopage.text.tokenizer import Tokenizer
from nanopage.vision.setup import make_image_reader

IDEFICS = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "text_config": {"model_type": "llama", "vocab_size": VOCAB_SIZE + len(IDEFICS_TOKENS), **TEXT},
    "vision_config": TOWER,
    "scale_factor": 2,
    "image_token_id": VOCAB_SIZE + 1,
}
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 2, "hidden_size": 64, "sliding_window": 512},
    "vision_config": TOWER,
    "mm_tokens_per_image": 16,
}
QWEN_TOWER = {"depth": 2, "hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "out_hidden_size": 64}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": {"vocab_size": VOCAB_SIZE + len(QWEN_TOKENS), "rope_parameters": ROPE, **TEXT},
    "vision_config": QWEN_TOWER,
    "image_token_id": VOCAB_SIZE + 2,
}
OLDER = QWEN | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "vision_config": {"depth": 2, "embed_dim": 48, "num_heads": 4, "hidden_size": 64},
}


def tower(**fields):
    return {"vision_config": TOWER | fields}


def qwen(**fields):
    return {"vision_config": QWEN_TOWER | fields}


FIELDS = [
    (IDEFICS, {"text_config": {"model_type": "mistral"}}, "text_config of the type 'mistral' is not supported"),
    (IDEFICS, {"image_token_id": 5000}, "image_token_id must be a token of the vocabulary"),
    (IDEFICS, {"image_token_id": True}, "image_token_id must be a token of the vocabulary"),
    (IDEFICS, {"scale_factor": 0}, "scale_factor must be a positive integer"),
    (IDEFICS, {"vision_config": 5}, "vision_config must be an object"),
    (IDEFICS, tower(num_channels=1), "vision_config: num_channels 1 is not supported"),
    (IDEFICS, tower(patch_size=[4, 4]), "vision_config: patch_size must be a positive integer"),
    (IDEFICS, tower(patch_size=64), "vision_config: patch_size is more than image_size=32"),
    (IDEFICS, tower(num_attention_heads=5), "vision_config: hidden_size must be a multiple of num_attention_heads=5"),
    (IDEFICS, tower(hidden_act="quick_gelu"), "vision_config: hidden_act 'quick_gelu' is not supported"),
    (IDEFICS, tower(layer_norm_eps=-1), "vision_config: layer_norm_eps must be a number"),
    (GEMMA, {"mm_tokens_per_image": 15}, "mm_tokens_per_image 15 is not the square of a divisor of 8"),
    (GEMMA, {"image_token_index": -1}, "image_token_index must be a token of the vocabulary"),
    (GEMMA, {"text_config": {"sliding_window": 15}}, "sliding_window is less than the 16 tokens of an image"),
    (GEMMA, {"text_config": {"final_logit_softcapping": 3.0}}, "final_logit_softcapping of Gemma 3 with images"),
    *(
        (IDEFICS, tower(**{name: 10**9}), f"vision_config: {name} must be at most {MAX_SIZES[name]:,}")
        for name in ("image_size", "patch_size")
    ),
    (IDEFICS, {"scale_factor": 10**9}, "scale_factor must be at most 64"),
    (GEMMA, {"mm_tokens_per_image": 10**9}, "mm_tokens_per_image must be at most 16,384"),
    (QWEN, {"image_token_id": -1}, "image_token_id must be a token of the vocabulary"),
    (QWEN, {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    (QWEN, {"rope_scaling": ROPE | {"mrope_section": [8, 8]}}, "mrope_section must be integers whose sum is 8"),
    (QWEN, {"rope_scaling": ROPE | {"mrope_section": [9, -1]}}, "mrope_section must be integers whose sum is 8"),
    (QWEN, {"rope_scaling": {"rope_type": "axial"}}, "rope_parameters of type 'axial' is not supported"),
    (QWEN, qwen(in_channels=1), "vision_config: in_channels 1 is not supported"),
    (QWEN, qwen(out_hidden_size=32), "vision_config: out_hidden_size 32 is not supported; supported: 64"),
    (QWEN, qwen(rope_parameters={"rope_type": "yarn"}), "vision_config: rope_parameters of type 'yarn'"),
    (QWEN, qwen(rope_parameters={"rope_theta": 0}), "vision_config: rope_theta must be a number"),
    (QWEN, qwen(fullatt_block_indexes=3), "vision_config: fullatt_block_indexes must be a list of integers"),
    (QWEN, qwen(num_heads=5), "vision_config: num_heads must divide 48 into heads of a multiple of 4"),
    (QWEN, qwen(num_heads=8), "vision_config: num_heads must divide 48 into heads of a multiple of 4"),
    (QWEN, qwen(head_dim=8), r"vision_config: head_dim 8 is not supported; supported: 12"),
    (QWEN, qwen(window_size=27), "vision_config: window_size is less than 28, the pixels of a token"),
    (QWEN, qwen(hidden_act="quick_gelu"), "vision_config: hidden_act 'quick_gelu' is not supported"),
    (OLDER, {"vision_config": {"hidden_size": 32}}, "vision_config: hidden_size 32 is not supported; supported: 64"),
    *(
        (QWEN, qwen(**{name: 10**9}), f"vision_config: {name} must be at most {MAX_SIZES[name]:,}")
        for name in ("depth", "spatial_merge_size", "temporal_patch_size", "window_size")
    ),
    *(
        (OLDER, {"vision_config": {name: 10**9}}, f"vision_config: {name} must be at most {MAX_SIZES[name]:,}")
        for name in ("embed_dim", "mlp_ratio")
    ),
]


@pytest.mark.parametrize(("config", "fields", "error"), FIELDS, ids=[error[:60] for *_, error in FIELDS])
def test_fields_of_config_json(config, fields, error):
    assert "image" in config_from_dict(config).encoders
    with pytest.raises(ValueError, match=rf"^config\.json: {error}"):
        config_from_dict(config | fields)


PROCESSORS = [
    (IDEFICS, {"do_convert_rgb": False}, "do_convert_rgb false is not supported"),
    (IDEFICS, {"do_resize": 1}, "do_resize must be true or false"),
    (IDEFICS, {"size": {"height": 32, "width": 32}}, "size with 'height' is not supported"),
    (IDEFICS, {"size": {"longest_edge": 10**9}}, "longest_edge must be at most 8,192"),
    (IDEFICS, {"max_image_size": {"longest_edge": 12}}, "max_image_size 12 gives 3 patches a side"),
    (IDEFICS, {"max_image_size": {"longest_edge": 2}}, "max_image_size 2 gives 0 patches a side"),
    (IDEFICS, {"resample": 9}, "resample must be an integer from 0 to 5"),
    (IDEFICS, {"image_mean": [1, 2]}, "image_mean must be a number, or three"),
    (IDEFICS, {"image_std": 0}, "image_std must not have a zero"),
    (IDEFICS, {"rescale_factor": -1}, "rescale_factor must be a number"),
    (GEMMA, {"size": {"height": 16, "width": 32}}, "size must be a height and a width of 32"),
    (GEMMA, {"do_resize": False}, "do_resize false is not supported"),
    (GEMMA, {"do_pan_and_scan": True}, "do_pan_and_scan true is not supported"),
    (QWEN, {"do_resize": False}, "do_resize false is not supported"),
    (QWEN, {"patch_size": 16}, "patch_size is 16, but 14 in vision_config"),
    (QWEN, {"merge_size": 3}, "merge_size is 3, but 2 in vision_config"),
    (QWEN, {"temporal_patch_size": None, "merge_size": 1}, "merge_size is 1, but 2 in vision_config"),
    (QWEN, {"temporal_patch_size": 1}, "temporal_patch_size is 1, but 2 in vision_config"),
    (QWEN, {"size": {"height": 16}}, "size with 'height' is not supported"),
    (QWEN, {"size": {"longest_edge": 16}}, r"min_pixels \(or size: shortest_edge\) must be an integer from 1"),
    (QWEN, {"max_pixels": 10**9}, r"max_pixels \(or size: longest_edge\) must be an integer from 1 to 67,108,864"),
    (QWEN, {"min_pixels": True}, r"min_pixels \(or size: shortest_edge\) must be an integer"),
]


@pytest.mark.parametrize(("config", "fields", "error"), PROCESSORS, ids=[error[:60] for *_, error in PROCESSORS])
def test_fields_of_the_image_processor(config, fields, error, tmp_path):
    save_tokenizer(tmp_path, QWEN_TOKENS if config is QWEN else IDEFICS_TOKENS, "")
    size = {"size": {"height": 32, "width": 32}} if config is GEMMA else PREPROCESSOR if config is IDEFICS else {}
    for name, written in (
        ("preprocessor_config.json", size | fields),
        ("processor_config.json", {"image_processor": size | fields}),
    ):
        (tmp_path / name).write_text(json.dumps(written))
        with pytest.raises(ValueError, match=rf"{name}: {error}"):
            make_image_reader(EngineConfig(), config_from_dict(config), tmp_path, Tokenizer(tmp_path, 400))
        (tmp_path / name).unlink()


def test_lengths_of_the_processor_must_be_the_models(tmp_path):
    save_tokenizer(tmp_path, IDEFICS_TOKENS, "")
    tokenizer = Tokenizer(tmp_path, 400)
    for config, name in ((IDEFICS, "image_seq_len"), (GEMMA, "image_seq_length")):
        processor = PREPROCESSOR if config is IDEFICS else {"size": {"height": 32, "width": 32}}
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor, name: 17}))
        with pytest.raises(ValueError, match=rf"{name} is 17, but"):
            make_image_reader(EngineConfig(), config_from_dict(config), tmp_path, tokenizer)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}}))
    with pytest.raises(ValueError, match="the tokenizer has no token '<start_of_image>'"):
        make_image_reader(EngineConfig(), config_from_dict(GEMMA), tmp_path, tokenizer)


def test_options(tmp_path, model):
    for option in ({"limit_mm_per_prompt": {"image": 1}}, {"allowed_media_domains": ["a"]}):
        with pytest.raises(ValueError, match=rf"{next(iter(option))}=.*, but .* sees no images"):
            LLM(str(model), **option)
    idefics_model(tmp_path / "idefics")
    for options, error in (
        ({"limit_mm_per_prompt": {"video": 1}}, "limit_mm_per_prompt has 'video': this model takes only 'image'"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt: image must be an integer of at least 0"),
        ({"allowed_local_media_path": "/no/such"}, "allowed_local_media_path='/no/such' is not a directory"),
    ):
        with pytest.raises(ValueError, match=error):
            LLM(str(tmp_path / "idefics"), **options)
    gemma_model(tmp_path / "gemma")
    with pytest.raises(ValueError, match="max_num_batched_tokens=8 is less than the 9 tokens of an image"):
        LLM(str(tmp_path / "gemma"), max_num_batched_tokens=8)
    for option in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"distributed_executor_backend": "mp"}):
        with pytest.raises(
            ValueError, match=rf"{next(iter(option))}=.* does not work with gemma: the tokens of an image"
        ):
            LLM(str(tmp_path / "gemma"), **option)


def test_data_of_prompts(tmp_path, model):
    idefics_model(tmp_path)
    llm = LLM(str(tmp_path), enforce_eager=True, num_gpu_blocks_override=100, limit_mm_per_prompt={"image": 1})
    for data, error in (
        ([picture()], "multi_modal_data must be a dict"),
        ({"video": 1}, "multi_modal_data has 'video': this model takes only 'image'"),
        ({"image": [picture()] * 2}, "2 images are more than 1"),
        ({"image": b"x"}, r"image 0: must be a PIL\.Image\.Image"),
        ({"image": "cat.png"}, "image 0: 'cat.png': images come as data URLs"),
        ({"image": []}, "the prompt has '<image>' 1 times, but there are 0 images"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            llm.generate({"prompt": "<image> cat", "multi_modal_data": data}, use_tqdm=False)
    prompt = {"prompt": "<image> cat", "multi_modal_data": {"image": picture()}}
    with pytest.raises(ValueError, match="multi_modal_data is not supported by this model"):
        LLM(str(tmp_path), enforce_eager=True, runner="pooling", num_gpu_blocks_override=100).embed(
            prompt, use_tqdm=False
        )
    with pytest.raises(ValueError, match="multi_modal_data is not supported by this model"):
        LLM(str(model), enforce_eager=True).generate({"prompt": "a", "multi_modal_data": {"image": picture()}})


def test_options_of_a_command_line():
    parser = EngineArgs.add_cli_args(__import__("argparse").ArgumentParser())
    for text in ("image=4", '{"image": 4}'):
        arguments = ["--limit-mm-per-prompt", text, "--allowed-media-domains", "a.org,b.org"]
        args = EngineArgs.from_cli_args(parser.parse_args(arguments))
        assert args.limit_mm_per_prompt == {"image": 4} and args.allowed_media_domains == ["a.org", "b.org"]
