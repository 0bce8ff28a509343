"""Tiny models that see images, and images for them."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import torch
from helpers import EOS, SPECIAL_TOKENS, VOCAB_SIZE, tiny_tokenizer
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

IDEFICS_TOKENS = (
    *("<fake_token_around_image>", "<image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
IDEFICS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
TOWER = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
    "initializer_range": 0.1,
}
PREPROCESSOR = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}


def picture(width=100, height=70, seed=0):
    """A picture with large and small patterns."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    pixels = np.kron(coarse, np.ones((8, 8, 1), dtype=np.uint8))[:height, :width]
    return Image.fromarray(pixels ^ rng.integers(0, 32, pixels.shape, dtype=np.uint8))


def file_of(image, kind="PNG", **options):
    """The bytes of an image's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(image):
    """The URL of an image, or of the bytes of a file."""
    data = image if isinstance(image, bytes) else file_of(image)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def documented(heading):
    """What docs/images.md says is refused, in the table with this heading: how each error begins, by case."""
    text = (Path(__file__).parents[2] / "docs" / "images.md").read_text()
    table = text.partition(f"\n| {heading} | error |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    return {name: error.removesuffix("...") for names, error in rows for name in names.split("; ")}


def prepared(item):
    """Pixels as the encoder prepares them."""
    pixels, scale, offset = (item.payload[name] for name in ("pixels", "scale", "offset"))
    return pixels * scale[:, None, None] + offset[:, None, None]


def logprobs(output):
    """The log-probability of each token of the prompt but the first."""
    ids = output.prompt_token_ids
    return torch.tensor([table[i].logprob for table, i in zip(output.prompt_logprobs[1:], ids[1:], strict=True)])


def save_tokenizer(directory, tokens, template):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    endoftext, bos, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, unk_token=endoftext)
    fast.chat_template = template
    fast.save_pretrained(directory)
    return fast


def randomize(model, seed=0):
    """transformers starts biases at 0 and norms at 1, which would hide a mistake in them."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return model.eval()


def idefics_model(directory, family="smolvlm", tower=None, preprocessor=None, text=None, **fields):
    """Save a tiny SmolVLM or Idefics3. Returns transformers' model and its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(directory, IDEFICS_TOKENS, IDEFICS_TEMPLATE)
    config = AutoConfig.for_model(
        family,
        text_config={"model_type": "llama", "vocab_size": VOCAB_SIZE + len(IDEFICS_TOKENS), **TEXT, **(text or {})},
        vision_config=TOWER | (tower or {}),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        **fields,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model = randomize(model)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | (preprocessor or {})))
    return model, tokenizer


GEMMA_TOKENS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")


def gemma_model(directory, tower=None, text=None, **fields):
    """Save a tiny Gemma 3 that sees images. Returns transformers' model and its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(directory, GEMMA_TOKENS, IDEFICS_TEMPLATE.replace("<image>", GEMMA_TOKENS[0]))
    places = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in zip(("boi", "image", "eoi"), GEMMA_TOKENS, strict=True)
    }
    tower = TOWER | {"image_size": 24} | (tower or {})
    sizes = {"vocab_size": VOCAB_SIZE + len(GEMMA_TOKENS), "head_dim": 32, "query_pre_attn_scalar": 32}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=TEXT | sizes | {"sliding_window": 12, "num_hidden_layers": 7} | (text or {}),
        vision_config=tower | {"vision_use_head": False},
        **{f"{name}_token_index": place for name, place in places.items()},
        **{"mm_tokens_per_image": 9} | fields,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    model = randomize(model)
    model.save_pretrained(directory)
    size = {"size": {"height": tower["image_size"], "width": tower["image_size"]}, "do_pan_and_scan": None}
    (directory / "preprocessor_config.json").write_text(json.dumps(size))
    return model, tokenizer


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_SIZE = {"shortest_edge": 100, "longest_edge": 5000}


def qwen_model(directory, family="qwen2_5_vl", tower=None, preprocessor=None, text=None, **fields):
    """Save a tiny Qwen2.5-VL or Qwen2-VL. Returns transformers' model and its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(directory, QWEN_TOKENS, IDEFICS_TEMPLATE.replace("<image>", QWEN_PLACE))
    newer = {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64, "window_size": 16}
    shape = newer | {"fullatt_block_indexes": [1]} if family == "qwen2_5_vl" else {"embed_dim": 48, "hidden_size": 64}
    sections = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    config = AutoConfig.for_model(
        family,
        text_config=TEXT | {"vocab_size": VOCAB_SIZE + 4, "rope_parameters": sections} | (text or {}),
        vision_config=shape | {"depth": 3, "num_heads": 4, "patch_size": 4, "initializer_range": 0.1} | (tower or {}),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        **fields,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model = randomize(model)
    model.save_pretrained(directory)
    sizes = {"patch_size": 4, "merge_size": config.vision_config.spatial_merge_size}
    temporal = {"temporal_patch_size": config.vision_config.temporal_patch_size}
    written = sizes | temporal | {"size": QWEN_SIZE} | (preprocessor or {})
    (directory / "preprocessor_config.json").write_text(json.dumps(written))
    return model, tokenizer
