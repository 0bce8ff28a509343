"""What `batch_invariant` does not work with: all that steps cannot compute row by row, with compiled code alone.

Such code adds up the products of a row in an order that depends neither on the other rows nor on their number:
tile_linear.cpp, flash_attention.cpp without splits, and the loops of Inductor's code for several rows.
"""

from nanopage.cpu.packed_linear import can_pack
from nanopage.weights.storage import joins_experts
from nanopage.worker.setup import Setup
from nanopage.worker.ways import why_not_compiled


def why_not_invariant(setup: Setup) -> str | None:
    """Why this model cannot have `batch_invariant` on this device, or None if it can. EngineConfig and pooling/files.py
    refuse other options that exclude it."""
    config = setup.model_config
    if setup.on_gpu:
        return "on a GPU, libraries choose how to divide products by the number of rows: use device='cpu'"
    if not can_pack(setup.dtype):
        return f"{str(setup.dtype).removeprefix('torch.')} is not compiled on this CPU"
    if config.encoders or config.encoded_positions:
        return "encoders are not compiled"
    if (why := why_not_compiled(setup)) is not None:
        return why
    if config.state:
        return "layers with a state compute a prompt in chunks"
    if windows := [window for window in setup.kinds.windows if window is not None]:
        most = min(windows)
        return f"layers have a window of {most} tokens, and what they add up begins with it: max_model_len={most} works"
    if config.mixer:
        return f"{config.architecture} has products that are not in tiles"
    if config.experts is not None and not joins_experts(setup):
        return "experts of this kind are computed one by one"
    if config.experts is not None and config.experts.shared_size and config.experts.shared_gate:
        return "the gate of the expert that computes all tokens is not in tiles"
    return None
