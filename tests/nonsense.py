"""Mutations that keep a model's files readable and change what they say: values that mean nothing, or disagree.

attacks.py runs them. The fields and tensors of a .gguf file are changed and packed again. Of an encoder, one or two
fields of its JSON files are changed.
"""

import json
import math
import random
import shutil
import struct
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFValueType

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
INTEGERS = [0, 1, 2, 3, 5, 7, 8, 31, 64, 255, 4097, 2**15, 2**20, 2**24, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, -1, -8]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e-6, 1e6, 1e15, 3e38, -3e38, math.nan, math.inf, -math.inf]
STRINGS = ["", " ", "\0", "x", "none", "linear", "yarn", "llama3", "longrope", "dynamic", "gpt2", "llama", "qwen2"]
STRINGS += ["é▁", "gpt-2", "llama-bpe", "zz qq", "a b c", "<s>", "x" * 300, "{{ messages", "mixtral", "gemma3"]
STRINGS += ["1", "nan", "\x1b]0;title\x07\x9b2J\u202e"]
# Fields that files may have, behind the name of the architecture or as they are.
OPTIONAL = """attention.key_length attention.value_length attention.sliding_window attention.head_count_kv
attention.scale attention.causal attention.layer_norm_epsilon rope.dimension_count
rope.dimension_sections rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
rope.scaling.attn_factor rope.scaling.yarn_beta_fast rope.freq_base_swa rope.freq_base expert_count
expert_used_count expert_feed_forward_length expert_weights_scale expert_weights_norm expert_gating_func
expert_group_count expert_shared_feed_forward_length attn_logit_softcapping final_logit_softcapping
embedding_scale residual_scale logit_scale vocab_size block_count"""
GENERAL = """general.alignment general.file_type general.quantization_version general.architecture split.count
tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id
tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id tokenizer.ggml.add_bos_token
tokenizer.ggml.add_eos_token tokenizer.ggml.add_space_prefix tokenizer.ggml.pre tokenizer.ggml.model
tokenizer.chat_template tokenizer.chat_template.tool_use"""
VOCABULARY = ["tokens", "token_type", "scores"]


# GGUF. A value is (type, value), and that of an array (ARRAY, (type, values)).


def pack_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack(kind: int, value) -> bytes:
    if kind == GGUFValueType.STRING:
        return pack_string(value)
    if kind == GGUFValueType.ARRAY:
        of, values = value
        return struct.pack("<IQ", of, len(values)) + b"".join(pack(of, each) for each in values)
    return struct.pack("<" + FORMATS[kind], value)


def nonsense_number(rng: random.Random, kind: int):
    if FORMATS[kind] in "fd":
        return rng.choice(FLOATS)
    if FORMATS[kind] == "?":
        return rng.random() < 0.5
    width = 8 * struct.calcsize(FORMATS[kind])
    number = rng.choice(INTEGERS) % 2**width
    return number - 2**width if FORMATS[kind].islower() and number >= 2 ** (width - 1) else number


def nonsense_scalar(rng: random.Random, kind: int):
    return rng.choice(STRINGS) if kind == GGUFValueType.STRING else nonsense_number(rng, kind)


def nonsense_value(rng: random.Random, kind: int, value) -> tuple[int, object]:
    """Most often of the same type."""
    if kind == GGUFValueType.ARRAY and rng.random() < 0.8:
        of, values = value
        return kind, (of, nonsense_array(rng, of, list(values)))
    if kind == GGUFValueType.ARRAY or rng.random() < 0.4:
        kind = rng.choice([*FORMATS, GGUFValueType.STRING])
    if rng.random() < 0.1:
        return GGUFValueType.ARRAY, (kind, [nonsense_scalar(rng, kind) for _ in range(rng.choice([0, 1, 2, 4, 300]))])
    return kind, nonsense_scalar(rng, kind)


def nonsense_array(rng: random.Random, of: int, values: list) -> list:
    if not values:
        return [nonsense_scalar(rng, of)]
    at = rng.randrange(len(values))
    match rng.randrange(8):
        case 0 | 1:
            values[at] = nonsense_scalar(rng, of)
        case 2:
            values[at] = rng.choice(values)
        case 3:
            del values[at]
        case 4:
            values.append(values[at] if rng.random() < 0.5 else nonsense_scalar(rng, of))
        case 5:
            return values[::-1]
        case 6:
            return values[:at]
        case 7:
            return [nonsense_scalar(rng, of)] * len(values)
    return values


def change_vocabulary(rng: random.Random, fields: dict) -> None:
    """Change every array that has a value for each token alike, so that only the embedding disagrees."""
    arrays = [fields[key][1][1] for name in VOCABULARY if (key := f"tokenizer.ggml.{name}") in fields]
    size = min(map(len, arrays), default=0)
    new = rng.choice([0, 1, size // 2, size - 1, size, size + 1, size * 2])
    if not size:
        return
    order = [i % size for i in range(new)]
    if rng.random() < 0.3:
        rng.shuffle(order)
    for values in arrays:
        copies = list(values)
        values[:] = [copies[i] for i in order]
        if isinstance(copies[0], str):  # a token that occurs twice is another fault
            values[size:] = [f"{token}{n}" for n, token in enumerate(values[size:], size)]


def nonsense_gguf(rng: random.Random, file: Path) -> bytes:
    reader = gguf.GGUFReader(file)
    fields: dict[str, tuple[int, object]] = {}
    for key, field in list(reader.fields.items())[3:]:
        array = field.types[0] == GGUFValueType.ARRAY
        fields[key] = (field.types[0], (field.types[-1], list(field.contents())) if array else field.contents())
    arch = fields["general.architecture"][1]
    tensors = [[t.name, [int(n) for n in t.shape], int(t.tensor_type), t.data.tobytes()] for t in reader.tensors]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                key = rng.choice(list(fields))
                fields[key] = nonsense_value(rng, *fields[key])
            case 4 | 5 | 6:
                key = rng.choice([*(f"{arch}.{name}" for name in OPTIONAL.split()), *GENERAL.split()])
                kind = rng.choice([4, 4, 4, 5, 6, 6, 7, 8, 8, 10, 11, 12])
                fields[key] = nonsense_value(rng, *fields.get(key, (kind, None)))
            case 7:
                change_vocabulary(rng, fields)
            case 8:
                nonsense_tensor(rng, rng.choice(tensors))
            case 9:
                tensors.append(list(rng.choice(tensors)))
                if rng.random() < 0.9:
                    names = ["output.weight", "rope_freqs.weight", "rope_factors_long.weight", "blk.1.attn_q.weight"]
                    tensors[-1][0] = rng.choice([*names, "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"])
    alignment = fields.get("general.alignment", (4, 32))[1]
    alignment = alignment if isinstance(alignment, int) and 1 <= alignment <= 2**20 else 32
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    head += b"".join(
        pack_string(key) + struct.pack("<I", kind) + pack(kind, value) for key, (kind, value) in fields.items()
    )
    data = b""
    for name, dims, kind, contents in tensors:
        head += pack_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += contents + bytes(-len(contents) % alignment)
    return head + bytes(-len(head) % alignment) + data


def nonsense_tensor(rng: random.Random, tensor: list) -> None:
    """Another type or shape, with as many bytes as that takes."""
    if rng.random() < 0.6:
        kind = rng.choice(list(GGMLQuantizationType))
        tensor[2] = int(kind)
    else:
        tensor[1] = rng.choice(
            [tensor[1][::-1], [*tensor[1], 1], [1, *tensor[1]], [n * 2 for n in tensor[1]], [32] * 3]
        )
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(tensor[2])]
    tensor[3] = bytes(-(-math.prod(tensor[1]) // block) * size)


# Encoders

ENCODER_FILES = ["config.json"] * 3 + ["modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"]
ENCODER_FILES += ["sentence_bert_config.json"]
ENCODER_FIELDS = {
    "config.json": """architectures num_hidden_layers num_attention_heads vocab_size type_vocab_size pad_token_id
    max_position_embeddings layer_norm_eps hidden_act position_embedding_type is_decoder id2label num_labels
    problem_type sentence_transformers sbert_ce_default_activation_function dtype torch_dtype eos_token_id
    quantization_config hidden_size intermediate_size bos_token_id""",
    "1_Pooling/config.json": """word_embedding_dimension embedding_dimension pooling_mode include_prompt
    pooling_mode_cls_token""",
    "config_sentence_transformers.json": "prompts default_prompt_name similarity_fn_name truncate_dim",
    "sentence_bert_config.json": "max_seq_length do_lower_case model_args tokenizer_args",
    "modules.json": "",
}
NAMES = ["cls", "mean", "max", "dot", "cosine", "relu", "gelu", "swish", "float16", "float64", "regression", "query"]
NAMES += ["..", "1_Pooling", "single_label_classification", "torch.nn.modules.linear.Identity", "BertModel"]
NAMES += [
    "RobertaModel",
    "XLMRobertaForSequenceClassification",
    "a/b",
    "/",
    "relative_key",
    "a\0b",
    "LlamaForCausalLM",
    "",
    "\ud800",
]
OBJECTS = [[], {}, [[]], [{}], {"": None}, {"query": 5}, {"query": "q: "}, {"0": "a"}, [0], {"activation_fn": []}, None]
OBJECTS += [{"activation_fn": {}}, {str(i): "x" for i in range(1000)}, ["BertModel"]]
OBJECTS.append(["RobertaForSequenceClassification"])


def nonsense_json(rng: random.Random):
    finite = [number for number in FLOATS if math.isfinite(number)]
    pick = rng.choice([[*INTEGERS, 10**30, 10**400], finite, STRINGS + NAMES, NAMES, OBJECTS, [True, False, None]])
    return rng.choice(pick)


def nonsense_encoder(rng: random.Random, model: Path, target: Path) -> Path:
    """A copy of an encoder's directory with nonsense in one or two fields of its JSON files."""
    shutil.copytree(model, target)
    for _ in range(rng.choice([1, 1, 1, 2])):
        name = rng.choice([name for name in ENCODER_FILES if (target / name).exists()])
        data = json.loads((target / name).read_text(encoding="utf-8"))
        owner = data
        if isinstance(data, list):  # modules.json
            if rng.random() < 0.3 or not data:
                data[rng.randrange(len(data) + 1) :] = [nonsense_json(rng)]
            owner = rng.choice(data)
        if isinstance(owner, dict):
            key = rng.choice([*owner, *ENCODER_FIELDS[name].split()] or ["x"])
            if rng.random() < 0.1:
                owner.pop(key, None)
            else:
                owner[key] = nonsense_json(rng)
        (target / name).write_text(json.dumps(data), encoding="utf-8")
    return target
