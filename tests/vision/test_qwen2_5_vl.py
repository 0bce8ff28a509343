"""Qwen2.5-VL and Qwen2-VL against transformers: what becomes of images, and the logits of every position."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from seeing import QWEN_PLACE, QWEN_TOKENS, data_url, logprobs, picture, prepared, qwen_model, save_tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from nanopage import LLM, SamplingParams
from nanopage.config.options import EngineConfig
from nanopage.reading.config import config_from_dict
from nanopage.text.prompts import TokenizedPrompt
from nanopage.text.tokenizer import Tokenizer
from nanopage.vision.images import to_rgb
from nanopage.vision.qwen2_tower import QwenTower
from nanopage.vision.setup import make_image_reader

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE = "<|image_pad|>"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = f"in the {QWEN_PLACE}morning{QWEN_PLACE} the cat {QWEN_PLACE}"
IMAGES = [picture(100, 70), picture(20, 60, seed=1), picture(33, 9, seed=2)]
MODELS = {
    "qwen2.5-vl": {},
    "other shapes": {
        "tower": {
            "patch_size": 5,
            "spatial_merge_size": 3,
            "temporal_patch_size": 1,
            "window_size": 31,
            "hidden_act": "gelu",
            "fullatt_block_indexes": [0, 2],
            "num_heads": 2,
            "depth": 4,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
        "text": {"rope_parameters": {"type": "mrope", "rope_theta": 500.0, "mrope_section": [1, 3, 2, 2]}},
        "preprocessor": {"patch_size": 5, "size": {"shortest_edge": 1000, "longest_edge": 8000}},
        "tie_word_embeddings": True,
    },
    "yarn, windows, MHA": {
        "tower": {"window_size": 1000},
        "text": {
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "mrope_section": [0, 5, 3]}
            | {"original_max_position_embeddings": 256},
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_key_value_heads": None,
            "num_hidden_layers": 3,
            "rms_norm_eps": 0.01,
        },
    },
    "qwen2-vl": {"family": "qwen2_vl"},
    "qwen2-vl, other shapes": {
        "family": "qwen2_vl",
        "tower": {"mlp_ratio": 2, "hidden_act": "silu", "embed_dim": 96, "rope_parameters": {"rope_theta": 99.0}},
        "text": {"rope_parameters": {"rope_theta": 1000.0, "mrope_section": [4, 2, 2]}},
    },
}


def reference(directory, tokenizer, text, images):
    """transformers' inputs for a prompt. Its processor needs torchvision, for videos."""
    options = json.loads((directory / "preprocessor_config.json").read_text())
    inputs = Qwen2VLImageProcessorPil(**options)(images, return_tensors="pt")
    for grid in inputs["image_grid_thw"]:
        text = text.replace(IMAGE, "<here>" * (grid.prod() // options["merge_size"] ** 2), 1)
    ids = tokenizer(text.replace("<here>", IMAGE), return_tensors="pt")["input_ids"]
    return {**inputs, "input_ids": ids, "mm_token_type_ids": (ids == tokenizer.convert_tokens_to_ids(IMAGE)).int()}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_transformers(options, tmp_path):
    model, tokenizer = qwen_model(tmp_path, **options)
    inputs = reference(tmp_path, tokenizer, TEXT, IMAGES)
    ids = inputs["input_ids"][0].tolist()
    with torch.inference_mode():
        logits = model(**inputs).logits[0]
        greedy = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, len(ids) :].tolist()
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    params = replace(GREEDY, prompt_logprobs=0)
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": IMAGES}}
    for budget in 2048, 37:  # whole, and in chunks that cut through images
        llm = LLM(str(tmp_path), enforce_eager=True, num_gpu_blocks_override=150, max_num_batched_tokens=budget)
        [output] = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids == ids
        torch.testing.assert_close(logprobs(output), expected, rtol=2e-4, atol=2e-4)
        assert output.outputs[0].token_ids == greedy


def test_later_turns_have_the_positions_of_the_whole_prompt(tmp_path):
    """With a prefix from the cache and names and fields as transformers 4 wrote
    them."""
    model, tokenizer = qwen_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    known = {name: f"model.{name}" for name in tensors if name.startswith("visual.")}
    known |= {name: name.replace("model.", "model.language_model.") for name in tensors if name.startswith("model.")}
    save_file({known.get(name, name): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(text | config))

    llm = LLM(str(tmp_path), enforce_eager=True, num_gpu_blocks_override=150, max_num_batched_tokens=50)
    messages = []
    for turn, (image, question) in enumerate(zip(IMAGES, ("where is the cat?", "and the dog?", "they"), strict=True)):
        content = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": question}]
        messages.append({"role": "user", "content": content})
        [output] = llm.chat(messages, GREEDY, use_tqdm=False)
        assert output.prompt.count(IMAGE) == turn + 1
        inputs = reference(tmp_path, tokenizer, output.prompt, IMAGES[: turn + 1])
        ids = inputs["input_ids"][0].tolist()
        assert output.prompt_token_ids == ids and (output.num_cached_tokens > 40) == (turn > 0)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, len(ids) :]
        assert output.outputs[0].token_ids == tokens.tolist()
        messages.append({"role": "assistant", "content": output.outputs[0].text})


SIZES = [(100, 70), (70, 100), (32, 32), (1, 1), (31, 33), (300, 3), (3, 300), (129, 127), (640, 200), (200, 1)]
PROCESSORS = {
    "defaults": {},
    "pixels as fields": {"min_pixels": 100, "max_pixels": 3000, "size": None, "patch_size": 4},
    "pixels as sizes": {"size": {"shortest_edge": 20_000, "longest_edge": 40_000}, "patch_size": 4, "merge_size": 3},
    "pixels as both": {"size": {"shortest_edge": 9, "longest_edge": 10}, "max_pixels": 5000, "patch_size": 8},
    "other numbers": {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "rescale_factor": 0.01,
        "resample": 2,
        "temporal_patch_size": 3,
    },
    "not normalized": {"do_normalize": False, "do_rescale": False},
}


def make_reader(directory, options):
    """What reads images with these options, and the tower that takes them apart."""
    fast = save_tokenizer(directory, QWEN_TOKENS, "")
    shape = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2} | options
    vision = {"patch_size": shape["patch_size"], "temporal_patch_size": shape["temporal_patch_size"], "depth": 1}
    vision |= {"spatial_merge_size": shape["merge_size"], "hidden_size": 16, "intermediate_size": 8, "num_heads": 4}
    config = config_from_dict(
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vision_config": vision | {"out_hidden_size": 64},
            "image_token_id": fast.convert_tokens_to_ids(IMAGE),
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "rope_scaling": {"mrope_section": [2, 3, 3]},
        }
    )
    (directory / "preprocessor_config.json").write_text(json.dumps(options))
    reader = make_image_reader(EngineConfig(), config, directory, Tokenizer(directory, 400))
    return reader, QwenTower(config.encoders["image"], 64)


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
def test_images_are_prepared_as_in_transformers(options, tmp_path):
    reader, tower = make_reader(tmp_path, options)
    theirs = Qwen2VLImageProcessorPil(**options)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    images.append(picture(40, 50).convert("L"))
    images.append(picture(40, 50))
    images[-1].putalpha(images[-2])
    expected = theirs(images, return_tensors="pt")
    tokens = [int(grid.prod()) // theirs.merge_size**2 for grid in expected["image_grid_thw"]]
    prompt = TokenizedPrompt(None, reader.tokenizer.encode(f"the {IMAGE} cat" * len(images)))
    reader(prompt, {"image": images})
    assert [item.length for item in prompt.items] == tokens
    assert [item.cost for item in prompt.items] == [count * theirs.merge_size**2 for count in tokens]
    assert prompt.token_ids.count(reader.config.image_token) == sum(tokens)
    for item in prompt.items:
        place = prompt.token_ids[item.position - 1 :][: item.length + 2]
        assert [token == reader.config.image_token for token in place] == [False, *[True] * item.length, False]
    patches = [tower._patches(torch.from_numpy(prepared(item))[None]) for item in prompt.items]
    np.testing.assert_allclose(torch.cat(patches), expected["pixel_values"], rtol=0, atol=1e-5)


def test_images_that_are_too_long_are_refused_and_16_bits_become_8(tmp_path):
    reader, _ = make_reader(tmp_path, {})
    for size in (10_000, 10), (1, 201):
        with pytest.raises(ValueError, match="200"):
            Qwen2VLImageProcessorPil()(picture(*size), return_tensors="np")
        with pytest.raises(ValueError, match=f"{size[0]:,} x {size[1]:,} pixels: a side is more than 200 times"):
            reader(TokenizedPrompt(None, [reader.placeholder]), {"image": picture(*size)})
    wide = Image.fromarray(np.asarray(picture(60, 60).convert("L")).astype(np.uint16) * 257)
    read = [reader.images.read(to_rgb(image))[1][0] for image in (wide, picture(60, 60).convert("L"))]
    assert (read[0] == read[1]).all()
