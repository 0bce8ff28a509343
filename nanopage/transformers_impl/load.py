"""Loads weights into a module of transformers, which renames, joins and ties them as `from_pretrained` does.

nanopage reads the files. Then it compares the module's logits with paged attention and the logits of the same module
under transformers.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from nanopage.device import check_weights_fit
from nanopage.files.model_files import memory_errors, shown
from nanopage.files.safetensors_checkpoint import opened, read_whole, safetensors_files, stored_bytes
from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.layers.attention import StepContext
from nanopage.state.kv_cache import KVCache
from nanopage.transformers_impl.config import elsewhere, read_module
from nanopage.transformers_impl.decoder import NAME, TransformersDecoder
from nanopage.weights.allocation import all_finite
from nanopage.weights.loader import FLOATS
from nanopage.worker.setup import Setup

logger = logging.getLogger("nanopage")

# The largest distance of most tokens' logits from transformers' logits, relative to their size.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 0.06, torch.bfloat16: 0.2}
CHUNKS = (0, 5), (5, 12)  # the tokens of the two steps that are compared


def load_decoder(setup: Setup, on_progress: Callable[[int, int], None] | None) -> tuple[Setup, TransformersDecoder]:
    """Load the model of a worker.

    Returns: the worker's setup, eager if the module cannot be captured as a CUDA graph, and the model.

    Raises:
        ValueError: weights that do not fit or are not finite, or logits that differ from transformers'.
        MemoryError: the device has too little memory for the weights; nothing has been allocated then.
    """
    model_config, path, dtype = setup.model_config, setup.path, setup.dtype
    if model_config.pooling is not None:
        problem = f"embeddings and scores do not work with {model_config.architecture} of transformers"
        raise ValueError(f"{problem}; {elsewhere(path, 'the library sentence-transformers computes them')}")
    module = read_module(path)
    assert module is not None  # read_config has read it
    config = module[0]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in model_class(config).parameters())
    check_weights_fit(num_parameters * dtype.itemsize, setup.device, dtype)
    options = {"dtype": dtype, "attn_implementation": NAME, "ignore_mismatched_sizes": True}
    if not setup.on_gpu or dtype == torch.float64:
        options["experts_implementation"] = "eager"
    with memory_errors(path):
        tensors = _read(setup, model_class._keys_to_ignore_on_load_unexpected or [], on_progress)
        # Without a path it reads no files.
        model, report = model_class.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True, **options
        )
        del tensors
        model = model.eval().requires_grad_(False).to(setup.device)
    problems = [f"{kind.removesuffix('_keys')}: {each}" for kind, some in report.items() for each in some]
    problems += [f"NaN or infinite: {name}" for name, values in model.named_parameters() if not all_finite(values)]
    if problems:
        text = "\n  ".join(sorted(problems)[:50])
        raise ValueError(f"the weights of {path} do not fit its configuration:\n  {text}")
    return _checked(setup, model)


def _read(setup: Setup, ignored: list[str], on_progress: Callable[[int, int], None] | None) -> dict[str, Tensor]:
    """The tensors of a model's files. Leaves out those that are not floats and match an expression of `ignored`.

    Raises: ValueError naming the file.
    """
    tensors: dict[str, Tensor] = {}
    files = safetensors_files(setup.path)
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        with opened(file) as content:
            for entry in stored_bytes(content, file):
                name, dtype = entry.tensor.name, entry.tensor.dtype
                if dtype in FLOATS and name not in tensors:
                    tensors[name] = read_whole(content, entry)
                elif name in tensors or not any(re.search(each, name) for each in ignored):
                    raise ValueError(f"{file}: {shown(name)} is of the type {dtype}, or in another file, too")
                done += entry.end - entry.begin
                if on_progress is not None:
                    on_progress(done, total)
    return tensors


@torch.inference_mode()
def _checked(setup: Setup, model: Any) -> tuple[Setup, TransformersDecoder]:
    """Make a decoder of a model. Raises: ValueError if its logits differ from those that transformers computes."""
    name, device, size = type(model).__name__, setup.device, setup.config.block_size
    positions = torch.arange(CHUNKS[-1][1], device=device)
    ids = (positions * 7919 + 5) % setup.model_config.vocab_size
    model.set_attn_implementation("eager")
    each = None, positions[None], positions.flip(0)[None]
    expected, same, other = (model(input_ids=ids[None], position_ids=some, use_cache=False).logits[0] for some in each)
    model.set_attn_implementation(NAME)
    if _difference(same, expected) > 5e-3 or torch.equal(other, expected):
        raise ValueError(f"{setup.path}: {name} counts positions in a way of its own; {elsewhere(setup.path)}")
    decoder, got, num_blocks = TransformersDecoder(model, setup.part.sliding_windows), [], -(-len(ids) // size)
    cache = KVCache(setup.part, num_blocks, size, setup.dtype, device)
    cache.clear([*range(num_blocks)])
    table = torch.arange(num_blocks, device=device, dtype=torch.int32 if setup.on_gpu else torch.int64)[None]
    for begin, end in CHUNKS:
        slots = positions[begin:end]  # the blocks are in order
        plain = GroupedAttention(slots, table, torch.tensor([end - begin]), torch.tensor([end]))
        attention = setup.make_attention(plain) if setup.on_gpu else plain
        step = StepContext(slots, [attention], cache.kinds.of_layers, cache.layers)
        got.append(decoder.logits(decoder(ids[begin:end], step)))
    if not (wrong := _difference(torch.cat(got), expected)) <= TOLERANCES[setup.dtype]:
        problem = f"{setup.path}: the logits of {name} differ by {wrong:.2g} of their size from transformers'"
        raise ValueError(f"{problem}; {elsewhere(setup.path)}")
    if setup.on_gpu and not setup.config.enforce_eager:
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                decoder.logits(decoder(ids[begin:end], step))
        except RuntimeError as error:  # the module looks at values, as experts may
            logger.info(f"steps of {name} cannot be captured as CUDA graphs: {error!s:.200}")
            setup = replace(setup, config=replace(setup.config, enforce_eager=True))
    return setup, decoder


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The distance between logits [T, vocab_size], relative to their size: the median over the tokens."""
    ours, theirs = ours.double(), theirs.double()
    return float(((ours - theirs).norm(dim=1) / (theirs - theirs.mean(1, keepdim=True)).norm(dim=1)).median())
