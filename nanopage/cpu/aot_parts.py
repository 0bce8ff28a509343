"""The parts of layers that aot.py compiles, and the names of their files."""

from nanopage.config.model import ModelConfig
from nanopage.state.layer_kinds import STATE

# What is compiled, in this order:
#   chain   aot_chain.cpp with cpu/flash_attention.cpp: attention, and the calls of the other parts
#   before  a layer up to the write to the cache
#   after   a layer after its attention
#   mixer   a whole layer with a state
#   head    the last norm and the head; for a single row, also the token with the largest logit
# All but the chain are compiled for two kinds of steps, by the number of rows that they compute:
#   one     a single row
#   many    any number of rows; without weights in tiles, the model's own norm and head then run instead
# In these steps, a layer with a state computes a token of each sequence. Its code for sequences with several tokens:
#   prompts
# Layers with slots for adapters are also compiled for two more kinds of steps, where a row has an adapter:
#   adapted-one, adapted-many
# Code for a single row rounds differently from code for many. So `batch_invariant` leaves out all that is for one.
# Where only some layers have experts, PLAIN follows the names of the parts of the others. CROSS follows those of layers
# that attend to all positions of an encoder, which are in one block. Their window is STATE: they see all keys.
PLAIN, CROSS = "-plain", "-cross"
CHAIN = "chain.so"


def has_mixer(config: ModelConfig, index: int) -> bool:
    """Whether a layer has a state in place of attention. K and V of an encoder's positions are a state, too."""
    return config.sliding_windows[index] == STATE and not config.encoded_positions


def parts_of(config: ModelConfig, index: int) -> list[str]:
    """The parts of a layer, in the order in which they run."""
    parts = ["mixer"] if has_mixer(config, index) else ["before", "after"]
    if config.sliding_windows[index] == STATE and config.encoded_positions:
        return [part + CROSS for part in parts]
    if config.experts is None or config.experts.layers[index]:
        return parts
    return [part + PLAIN for part in parts]


def file_kinds(config: ModelConfig, tiled: bool, adapted: bool, invariant: bool = False) -> dict[str, tuple[str, str]]:
    """The files to compile, in the order of their use: name -> (part, kind).

    Args: tiled: whether weights are in tiles; adapted: whether layers have slots for adapters; invariant: see Compiled.
    """
    layers = list(dict.fromkeys(part for index in range(config.num_layers) for part in parts_of(config, index)))
    kinds = [(part, "one") for part in (*layers, "head")] + [(part, "many") for part in layers]
    if tiled:
        kinds += [("head", "many")]
    kinds += [(part, "prompts") for part in layers if part.startswith("mixer")]
    if adapted:
        kinds += [(part, f"adapted-{kind}") for kind in ("one", "many") for part in layers]
    if invariant:
        kinds = [(part, kind) for part, kind in kinds if kind != "one"]
    return {CHAIN: ("chain", "")} | {f"{part}-{kind}.so": (part, kind) for part, kind in kinds}
