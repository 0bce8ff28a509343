"""Heads that make drafts, for tests: random ones as files, and models that they are always right about."""

import json
import math

import torch
from helpers import VOCAB_SIZE
from safetensors.torch import load_file, save_file

TAPS = "eagle_aux_hidden_state_layer_ids"


def save_eagle(directory, hidden_size, num_logits=VOCAB_SIZE, seed=0, change=lambda tensors: None, **fields):
    """Save a random EAGLE-3 head as published ones are. Args: change: may change the tensors, in place."""
    heads, kv_heads, head_dim, intermediate = 4, 2, 8, 48
    shapes = {
        "fc": (hidden_size, len(fields.get(TAPS, "123")) * hidden_size),
        "midlayer.self_attn.q_proj": (heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.k_proj": (kv_heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.v_proj": (kv_heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.o_proj": (hidden_size, heads * head_dim),
        "midlayer.mlp.gate_proj": (intermediate, hidden_size),
        "midlayer.mlp.up_proj": (intermediate, hidden_size),
        "midlayer.mlp.down_proj": (hidden_size, intermediate),
        **{f"midlayer.{name}": (hidden_size,) for name in ("hidden_norm", "input_layernorm")},
        "midlayer.post_attention_layernorm": (hidden_size,),
        "norm": (hidden_size,),
        "lm_head": (num_logits, hidden_size),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    targets = torch.randperm(VOCAB_SIZE, generator=generator)[:num_logits]
    tensors["d2t"] = targets - torch.arange(num_logits)
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, targets, True)
    change(tensors)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": num_logits,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        **fields,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def circle(steps=0):
    """A point on a circle for each token, some steps further than its own: [VOCAB_SIZE, 3]. The last number is 1."""
    angles = 2 * math.pi * (torch.arange(VOCAB_SIZE, dtype=torch.float64) + steps) / VOCAB_SIZE
    return torch.stack((angles.cos(), angles.sin(), torch.ones_like(angles)), dim=1)


def count_on(directory, norm=1.0):
    """Make a saved model that says the next number after each token: layers add nothing. Args: norm: a weight of 1."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
    for name, points in (("model.embed_tokens.weight", circle()), ("lm_head.weight", circle(-1))):
        tensors[name].zero_()[:, :3] = points.to(tensors[name].dtype)
    tensors["lm_head.weight"] *= 100
    tensors["model.norm.weight"].fill_(norm)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def count_with(tensors):
    """Make the EAGLE-3 head that is always right about such a model. It reads the model's last state, which it turns by
    a step: x + down(gate * up(norm(x))), with a gate that is constant."""
    for name in ("fc", "midlayer.self_attn.o_proj", "midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"):
        tensors[f"{name}.weight"].zero_()
    for name in ("midlayer.mlp.down_proj", "lm_head"):
        tensors[f"{name}.weight"].zero_()
    for name in ("midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"].fill_(1.0)
    size = len(tensors["norm.weight"])
    tensors["fc.weight"][:, :size] = torch.eye(size)
    tensors["midlayer.mlp.gate_proj.weight"][:, 2] = 40.0
    scale = math.sqrt(size / 2)  # a state has the numbers of a point, whose squares have the sum 2
    turn = 2 * math.pi / VOCAB_SIZE
    rotation = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    tensors["midlayer.mlp.up_proj.weight"][:2, :2] = rotation - torch.eye(2)
    tensors["midlayer.mlp.down_proj.weight"][:2, :2] = torch.eye(2) / (40 * scale * scale)
    targets = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["lm_head.weight"][:, :3] = circle(-1)[targets].float()
