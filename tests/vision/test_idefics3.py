"""Idefics3 and SmolVLM against transformers: what becomes of images, and the logits of every position."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from seeing import (
    IDEFICS_TOKENS,
    PREPROCESSOR,
    TOWER,
    data_url,
    idefics_model,
    logprobs,
    picture,
    prepared,
    save_tokenizer,
)
from transformers.models.idefics3 import Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from nanopage import LLM, SamplingParams
from nanopage.checks.fields import Fields
from nanopage.text.prompts import TokenizedPrompt
from nanopage.text.tokenizer import Tokenizer
from nanopage.vision.config import read_siglip
from nanopage.vision.idefics3 import Idefics3Config, read_images
from nanopage.vision.reader import ImageReader

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [(100, 70), (70, 100), (32, 32), (1, 1), (31, 33), (300, 3), (3, 300), (129, 127), (640, 200)]
OPTIONS = {
    "plain": {},
    "another tile and size": {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 40}},
    "not cut": {"do_image_splitting": False},
    "not scaled first": {"do_resize": False},
    "bicubic": {"resample": 3},
    "other numbers": {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.01},
    "not normalized": {"do_normalize": False},
    "not rescaled": {"do_rescale": False, "image_mean": 100.0, "image_std": [50.0, 60.0, 70.0]},
}


def make_reader(directory, most=16):
    tower = read_siglip(Fields(TOWER, "config.json"), 32, 12, 16)
    tokenizer = Tokenizer(directory, 400)
    config = Idefics3Config(tower, 2, tokenizer.backend.token_to_id("<image>"))
    return ImageReader(read_images(directory, config), config, tokenizer, str, most)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_images_are_prepared_as_in_transformers(options, tmp_path):
    fast = save_tokenizer(tmp_path, IDEFICS_TOKENS, "")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | options))
    reader = make_reader(tmp_path)
    theirs = Idefics3Processor(
        Idefics3ImageProcessorPil(**PREPROCESSOR | options), fast, image_seq_len=reader.images.tokens
    )
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    for images in ([each] for each in pictures), [pictures[:3]]:
        for chosen in images:
            text = "the\n".join(["in", *["<image>\n"] * len(chosen)]) + " cat"
            expected = theirs(text=text, images=[chosen], return_tensors="np", return_row_col_info=True)
            prompt = TokenizedPrompt(text, reader.tokenizer.encode(text))
            reader(prompt, {"image": chosen})
            assert prompt.token_ids == expected["input_ids"][0].tolist()
            pixels = expected["pixel_values"][0]
            np.testing.assert_allclose([prepared(item) for item in prompt.items], pixels, rtol=0, atol=1e-5)
            places = [p for item in prompt.items for p in range(item.position, item.position + item.length)]
            assert places == [p for p, token in enumerate(prompt.token_ids) if token == reader.config.image_token]


MODELS = {
    "smolvlm": {},
    "idefics3, other shapes": {
        "family": "idefics3",
        "tower": {"image_size": 20, "hidden_act": "gelu", "num_attention_heads": 3, "layer_norm_eps": 0.1},
        "preprocessor": {"max_image_size": {"longest_edge": 40}, "size": {"longest_edge": 80}},
        "tie_word_embeddings": True,
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "in the <image>morning<image> the cat"


def reference(directory, model, tokenizer, text, images):
    """transformers' inputs for a prompt, and its logits of every position."""
    options = json.loads((directory / "preprocessor_config.json").read_text())
    side = options["max_image_size"]["longest_edge"] // model.config.vision_config.patch_size
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(**options), tokenizer, image_seq_len=(side // model.config.scale_factor) ** 2
    )
    inputs = processor(text=text, images=[images], return_tensors="pt")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return inputs["input_ids"][0].tolist(), model(**inputs).logits[0]


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_transformers(options, tmp_path):
    model, tokenizer = idefics_model(tmp_path, **options)
    images = [picture(100, 70), picture(20, 60, seed=1)]
    ids, logits = reference(tmp_path, model, tokenizer, TEXT, images)
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    params = replace(GREEDY, prompt_logprobs=0)
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": images}}
    for budget in 2048, 37:  # whole, and in chunks that cut through squares
        llm = LLM(str(tmp_path), enforce_eager=True, num_gpu_blocks_override=150, max_num_batched_tokens=budget)
        [output] = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids == ids
        torch.testing.assert_close(logprobs(output), expected, rtol=2e-4, atol=2e-4)
        assert output.outputs[0].token_ids[0] == logits[-1].argmax()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smolvlm")
    idefics_model(directory)
    return directory


@pytest.fixture(scope="module")
def llm(directory):
    return LLM(str(directory), enforce_eager=True, num_gpu_blocks_override=150, limit_mm_per_prompt={"image": 3})


def encoder_calls(llm):
    """The hashes of the items that the encoder has read so far."""
    return [*llm.engine.executor.worker.runner.table.items.outputs]


def test_the_latest_images_are_kept_as_they_were_prepared(llm, monkeypatch):
    reader, prompts = (
        llm.engine.input_processor.prompts.item_readers["multi_modal_data"],
        llm.engine.input_processor.prompts,
    )
    reader.prepared.clear()

    def read(*seeds):
        images = [picture(seed=seed) for seed in seeds]
        return prompts.read({"prompt": "<image>" * len(seeds), "multi_modal_data": {"image": images}})

    first, again = read(1), read(2, 1)
    assert len(reader.prepared) == 2 and first.items[0].position == 2
    size = len(first.items)
    for old, new in zip(first.items, again.items[size:], strict=True):
        assert old.payload is new.payload and old.hash == new.hash and old.position < new.position
    monkeypatch.setattr("nanopage.vision.reader.PREPARED_BYTES", reader._num_bytes())
    read(3)
    assert len(reader.prepared) == 2  # the first one, which was used last, and the third
    read(1)
    assert len(reader.prepared) == 2 and read(1).items[0].payload is first.items[0].payload
    monkeypatch.setattr("nanopage.vision.reader.PREPARED_BYTES", 1)
    assert read(4, 5).items and len(reader.prepared) == 1


def test_a_second_turn_does_not_read_its_images_again(llm):
    image = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "where is the cat?"}]}]
    [first] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert first.prompt == "<|im_start|>user:<image> where is the cat?<|im_end|>\n<|im_start|>assistant:"
    [whole] = llm.chat(
        [{"role": "user", "content": [{"type": "image", "image": picture()}, "where is the cat?"]}], GREEDY
    )
    assert whole.outputs[0].token_ids == first.outputs[0].token_ids
    llm.engine.executor.worker.runner.table.items.forget()
    messages += [{"role": "assistant", "content": "the"}, {"role": "user", "content": "and the dog?"}]
    [second] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert second.num_cached_tokens > len(first.prompt_token_ids) - 20
    assert not encoder_calls(llm)
    other = [{"role": "user", "content": [{"type": "image", "image": picture(seed=5)}, "where is the cat?"]}]
    [different] = llm.chat(other, GREEDY, use_tqdm=False)
    assert different.num_cached_tokens < 16 and encoder_calls(llm)
