"""Gemma 3 with images against transformers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from seeing import GEMMA_TOKENS, gemma_model, logprobs, picture, prepared
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from nanopage import LLM, SamplingParams
from nanopage.checks.fields import Fields
from nanopage.text import tokenizer as tokenizers_here
from nanopage.text.prompts import TokenizedPrompt
from nanopage.vision.config import read_siglip
from nanopage.vision.gemma3 import Gemma3Config, read_images
from nanopage.vision.reader import ImageReader

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "the \n<start_of_image>\n\ncat <start_of_image>dog in the morning"
IMAGES = [picture(), picture(30, 90, seed=1)]
MODELS = {
    "plain": {},
    "other shapes": {
        "tower": {"image_size": 28, "hidden_act": "gelu", "layer_norm_eps": 0.1, "num_hidden_layers": 1},
        "text": {"sliding_window": 49, "attention_bias": True, "query_pre_attn_scalar": 100},
        "mm_tokens_per_image": 49,
        "tie_word_embeddings": False,
    },
}


def reference(directory, model, tokenizer):
    """transformers' inputs for TEXT and IMAGES, and its logits of every position."""
    names = ("boi_token", "image_token", "eoi_token")
    for name, token in zip(names, GEMMA_TOKENS, strict=True):
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    options = json.loads((directory / "preprocessor_config.json").read_text())
    length = model.config.mm_tokens_per_image
    processor = Gemma3Processor(Gemma3ImageProcessorPil(**options), tokenizer, image_seq_length=length)
    inputs = processor(text=TEXT, images=[IMAGES], return_tensors="pt")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return inputs, model(**inputs).logits[0]


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_transformers(options, tmp_path):
    model, tokenizer = gemma_model(tmp_path, **options)
    inputs, logits = reference(tmp_path, model, tokenizer)
    ids, tokens = inputs["input_ids"][0].tolist(), model.config.mm_tokens_per_image
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    params = replace(GREEDY, prompt_logprobs=0)
    prompt = {"prompt": TEXT, "multi_modal_data": {"image": IMAGES}}
    for budget in 2048, tokens, tokens + 3:  # whole, and in chunks that do not cut images
        llm = LLM(str(tmp_path), enforce_eager=True, num_gpu_blocks_override=150, max_num_batched_tokens=budget)
        reader = llm.engine.input_processor.prompts
        pixels = [prepared(item) for item in reader.read(prompt).items]
        np.testing.assert_allclose(pixels, inputs["pixel_values"], rtol=0, atol=1e-5)
        [output] = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids == ids
        torch.testing.assert_close(logprobs(output), expected, rtol=2e-4, atol=2e-4)
        # The second request begins in the middle of an image, beside another that decodes and a third that waits.
        others = [
            {"prompt": text, "multi_modal_data": {"image": IMAGES}} for text in (TEXT, "in " + TEXT, TEXT + " they")
        ]
        [again, *_] = llm.generate(others, GREEDY, use_tqdm=False)
        cached = again.num_cached_tokens
        assert cached and reader.read(prompt).items[1].position < cached < len(ids)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_newlines_beside_an_image_are_tokens_together(tmp_path):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokens = [AddedToken(token, special=True, normalized=False) for token in GEMMA_TOKENS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=263, initial_alphabet=alphabet, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator(["\n" * 4, "\n\n\n", "\n\n"] * 9, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizers_here.Tokenizer(tmp_path, 263)
    assert len(tokenizer.encode("\n\n\n")) < 3 and len(tokenizer.encode("\n" * 4)) == 1
    tower = read_siglip(Fields({"image_size": 224, "patch_size": 56}, "config.json"), 16, 12, 12)
    config = Gemma3Config(tower, 4, 1)
    reader = ImageReader(read_images(tmp_path, config), config, tokenizer, str, 9)
    begin, image, end = GEMMA_TOKENS
    for text in ("a\n{}\nb", "{}{}", "\n\n{}b{}\n\n\n{}\n", "a{}", "\n{}\n \n{}\n{}a\n"):
        count = text.count("{}")
        prompt = TokenizedPrompt(None, tokenizer.encode(text.replace("{}", begin)))
        reader(prompt, {"image": [picture()] * count})
        whole = text.replace("{}", f"\n\n{begin}{image * 4}{end}\n\n")
        assert prompt.token_ids == tokenizer.encode(whole)
        assert [prompt.token_ids[item.position :][:5] for item in prompt.items] == [[1] * 4 + [2]] * count
