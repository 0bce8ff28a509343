"""Puts an engine to sleep, wakes it, and gives it other weights, with vLLM's names. worker.py is the workers' half.

A sleeping engine has given memory back, and refuses requests until it is awake. All of this happens between steps, and
only while no request runs or waits. The prefix cache is empty afterwards. Like the engine, this is not safe for
threads: `LLM` puts its lock around it, and `AsyncLLM` leaves it to the engine's thread.
"""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanopage.engine.engine import LLMEngine
from nanopage.engine.recovery import die, recover
from nanopage.files.model_files import shown
from nanopage.step import WorkerDiedError

if TYPE_CHECKING:
    from nanopage.standby.given import Weights

TAGS = ("weights", "kv_cache")  # vLLM's names for what sleeps


def sleep(engine: LLMEngine, level: int = 1) -> None:
    """Give back the memory of the KV cache and of the weights, until `wake_up`.

    On a GPU, the weights of level 1 wait in host memory. On a CPU they stay where they are. Level 2 drops them: after
    `wake_up`, the engine needs `update_weights`. Adapters in their slots and a draft model stay in memory.

    Raises:
        ValueError: another level, or a model whose weights could not be updated.
        RuntimeError: a request has not ended; the message names it.
        WorkerDiedError: no worker can go on.
    """
    if type(level) is not int or level not in (1, 2):
        raise ValueError(f"level={shown(level)} is not supported: 1 keeps the weights, 2 drops them")
    if level == 2:
        _check_updatable(engine, "sleep(level=2)")
    _rest(engine, "sleep()")
    engine.asleep, engine.has_weights = frozenset(TAGS), engine.has_weights and level == 1
    _open_or_close(engine)
    _call(engine, "sleep", level)


def wake_up(engine: LLMEngine, tags: Iterable[str] | None = None) -> None:
    """Take back the memory of "weights" or "kv_cache", or of both. What is awake stays as it is.

    Raises:
        ValueError, TypeError: other tags.
        RuntimeError, MemoryError: there is not enough memory now. The call can be repeated.
        WorkerDiedError: no worker can go on.
    """
    tags = TAGS if tags is None else tags
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise TypeError(f"tags must be a list of 'weights' and 'kv_cache', not {shown(tags)}")
    named = [*tags]
    if unknown := [tag for tag in named if tag not in TAGS]:
        raise ValueError(f"tags: {shown(unknown[0])} is neither 'weights' nor 'kv_cache'")
    if wakes := [tag for tag in TAGS if tag in named and tag in engine.asleep]:
        _call(engine, "wake_up", wakes)
    engine.asleep -= {*wakes}
    _open_or_close(engine)


def update_weights(engine: LLMEngine, weights: "Weights") -> None:
    """Replace all weights of the model, in place. Compiled code and captured graphs stay valid.

    The weights are loaded beside the old ones, as at the start: names as in the model's own files, then fused, packed,
    quantized or divided among workers. They replace the old ones only when every worker has them, so an error changes
    nothing. Until then, the host's memory holds the model a second time.

    Args:
        weights: a directory of safetensors, a .safetensors file, or pairs (name, tensor), such as
            `model.named_parameters()`. They are complete: no tensor keeps its old values. A config.json beside
            them is not read.

    Raises:
        ValueError: tensors that are missing, unexpected, mis-shaped, of a wrong type or not finite, or that this engine
            would have to store in another way; a model whose weights cannot be updated.
        FileNotFoundError, TypeError: `weights` is none of these.
        RuntimeError: a request has not ended, or the weights sleep.
        MemoryError, OSError: there is no room for the weights, in memory or as files.
        WorkerDiedError: no worker can go on.
    """
    from nanopage.standby.given import as_files  # imports torch

    _check_updatable(engine, "update_weights()")
    if "weights" in engine.asleep:
        raise RuntimeError("update_weights(): the weights sleep: call wake_up(['weights']) first")
    _rest(engine, "update_weights()")
    with as_files(weights) as path:
        try:
            _call(engine, "load", str(path))
        except BaseException:
            with contextlib.suppress(WorkerDiedError):
                _call(engine, "drop")
            raise
    engine.has_weights = False  # until all are there, even if Ctrl-C comes before
    _open_or_close(engine)
    _call(engine, "take")
    engine.has_weights = True
    _open_or_close(engine)


def _check_updatable(engine: LLMEngine, what: str) -> None:
    if engine.model_config.model_impl == "transformers":
        raise ValueError(f"{what} does not work with model_impl='transformers', whose modules transformers fills")
    if engine.model_path.suffix == ".gguf":
        raise ValueError(f"{what} does not work with {engine.model_path.name}: only safetensors can be updated")


def _rest(engine: LLMEngine, what: str) -> None:
    """Give up steps in flight, and forget all prefixes. Raises: RuntimeError if a request has not ended."""
    if engine.dead_error is not None:
        raise engine.dead_error
    if engine.has_unfinished_requests():
        processor = engine.output_processor
        names = [*processor.requests, *(output.request_id for output in processor.outputs)]
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        raise RuntimeError(f"{what}: request {names[0]!r} has not ended{more}: let it end, or abort it")
    engine.in_call = True  # as after an exception
    recover(engine)


def _open_or_close(engine: LLMEngine) -> None:
    """Say why requests are refused, if they are."""
    closed = None
    if engine.asleep:
        closed = f"the engine sleeps ({', '.join(sorted(engine.asleep))}): call wake_up() first"
    elif not engine.has_weights:
        closed = "the engine has no weights: sleep(level=2) has dropped them, or an update was interrupted. "
        closed += "Call update_weights() first"
    engine.input_processor.closed = closed


def _call(engine: LLMEngine, method: str, *arguments: Any) -> None:
    try:
        engine.executor.call(method, *arguments)
    except WorkerDiedError as error:
        die(engine, error)
        raise
