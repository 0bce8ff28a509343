"""What layers keep of a sequence: how much, what a state remembers, and where two prompts can share one.

python docs/course/experiments/kept.py
"""

from dataclasses import replace

import torch
from experts import config_of

from nanopage.config.model import ModelConfig
from nanopage.engine.block_manager import BlockManager
from nanopage.recurrent.delta_rule import delta_rule
from nanopage.recurrent.states import divided
from nanopage.state.layer_kinds import STATE

MODELS = {"Llama-3.2-1B": "no shared heads", "gemma-3-270m": "no windows", "LFM2-350M": "no states"}
CONTEXTS = 1024, 8192, 32768
LATENT = 512 + 64, 61  # numbers that a token of DeepSeek-V3 keeps in a layer; layers
ALL_HEADS = 128 * (128 + 64 + 128)  # numbers of K and V of its 128 heads, which attention uses
BLOCK_SIZE = 8
WRITES = (0, 1.0), (1, 2.0), (0, 5.0), (2, 3.0), (1, 4.0)  # (key, value)


def kept(config: ModelConfig, context: int) -> int:
    """Bytes that the layers keep of a sequence, in bfloat16; states in float32. It counts tokens, not whole blocks."""
    total = 0
    for window, (num_heads, size) in zip(config.sliding_windows, config.heads, strict=True):
        if window == STATE:
            total += 2 * divided(config.state, 2)[-1][1] * 4
        else:
            total += 2 * num_heads * size * min(context, window or context) * 2
    return total


def sizes() -> dict[str, list[int]]:
    """Bytes for each of CONTEXTS: of each model, and of the same model without its way to keep less."""
    rows = {}
    for name, without in MODELS.items():
        config = config_of(name)
        if without == "no shared heads":
            plain = replace(config, num_kv_heads=config.num_heads)
        else:
            plain = replace(config, sliding_windows=(None,) * config.num_layers)
        rows[name] = [kept(config, context) for context in CONTEXTS]
        rows[f"{name}, {without}"] = [kept(plain, context) for context in CONTEXTS]
    numbers, layers = LATENT
    rows["DeepSeek-V3"] = [2 * numbers * layers * context for context in CONTEXTS]
    rows["DeepSeek-V3, no latents"] = [2 * ALL_HEADS * layers * context for context in CONTEXTS]
    return rows


def memory(corrects: bool) -> list[list[float]]:
    """What a state of 4 x 1 numbers returns for the keys 0 to 2 after each of WRITES.

    Args: corrects: by the delta rule. Otherwise, each write is added.
    """
    state, keys, rows = torch.zeros(1, 1, 4, 1), torch.eye(4), []
    for key, value in WRITES:
        k, v = keys[key].view(1, 1, 4), torch.tensor(value).view(1, 1, 1)
        if corrects:
            keep_all, whole = torch.zeros(1, 1), torch.ones(1, 1)  # the log of a decay of 1; beta
            _, state = delta_rule(k, k, v, keep_all, whole, state, None)
        else:
            state = state + k[..., None] * v[..., None, :]
        rows.append((keys[:3] @ state[0, 0])[:, 0].tolist())
    return rows


def share() -> list[tuple[int, list[int]]]:
    """Three prompts that begin with the same 24 tokens, for a model with attention and states: the tokens that each
    finds in the prefix cache, and where the steps end that compute the others."""
    manager, found = BlockManager(64, BLOCK_SIZE, windows=(None, STATE)), []
    for number in range(3):
        tokens = [*range(24), *range(1000 * number + 100, 1000 * number + 116)]
        marks = manager.prefixes.marks(tokens, "", [])
        hit = start = manager.allocate(number, manager.lookup(tokens), len(tokens))
        ends = [*(mark for mark in marks if mark > hit), len(tokens)]
        for end in ends:
            if not manager.grow(number, start, end):
                raise RuntimeError("the pool is too small")
            manager.register(number, tokens, end)
            manager.slide(number, end, marks)
            start = end
        manager.free(number)
        found.append((hit, ends))
    return found


def main() -> None:
    print("MiB of a sequence" + " " * 16 + "".join(f"{f'{context:,}':>10}" for context in CONTEXTS) + " tokens")
    for name, row in sizes().items():
        print(f"{name:33}" + "".join(f"{f'{size / 2**20:,.1f}':>10}" for size in row))
    print("\nwrite        sum of all writes    delta rule        (what keys 0, 1 and 2 return)")
    for (key, value), *rows in zip(WRITES, memory(False), memory(True), strict=True):
        print(f"{value:g} for key {key}" + "".join(f"{' '.join(f'{x:3g}' for x in row):>18}" for row in rows))
    print("\nthree prompts of 40 tokens, of which the first 24 are the same")
    for number, (hit, ends) in enumerate(share(), 1):
        print(f"prompt {number}: {hit} tokens were cached; steps end at {', '.join(map(str, ends))}")


if __name__ == "__main__":
    main()
