"""What an executor and its worker processes say to each other, as MessagePack with a tag for each kind of message.

msgspec checks types while it decodes, and decoding cannot run code.

executor                worker
Start              ─▶
                   ◀─   Progress, ..., Measured
Agreed             ─▶
                   ◀─   Ready
Run, Masks, Run... ─▶                         (masks only for a batch that awaits them)
                   ◀─   Result, Result, ...   (from the worker that samples)
Compile            ─▶
                   ◀─   Progress, ..., Ready
Call               ─▶                         (between steps)
                   ◀─   Called
Rest               ─▶                         (no request is left)
Stop               ─▶
Ping               ─▶                         (at any time)
                   ◀─   Pong
                   ◀─   Log, Failed
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from nanopage.config.options import EngineConfig
from nanopage.step import Batch, BatchResult, Capacity


class Start(msgspec.Struct, tag=True):
    """Load a part of a model.

    path: the model's path. address: where the workers meet (see `Ranks`). local_rank: the worker's GPU, if any.
    """

    config: EngineConfig
    path: str
    rank: int
    local_rank: int
    address: str


class Agreed(msgspec.Struct, tag=True):
    """What every worker can hold."""

    capacity: Capacity


class Run(msgspec.Struct, tag=True):
    """number: the number of the batch. The batch's Result has the same number."""

    number: int
    batch: Batch


class Masks(msgspec.Struct, tag=True):
    """The rest of the masks of the last batch (see `Executor.add_masks`)."""

    masks: dict[int, bytes]


class Rest(msgspec.Struct, tag=True):
    pass


class Compile(msgspec.Struct, tag=True):
    pass


class Call(msgspec.Struct, tag=True):
    """Call a method of the worker's standby (standby/worker.py). number: the Called that answers has the same."""

    number: int
    method: Literal["sleep", "wake_up", "load", "take", "drop"]
    arguments: list[int | str | list[str]]


class Ping(msgspec.Struct, tag=True):
    pass


class Stop(msgspec.Struct, tag=True):
    pass


class Progress(msgspec.Struct, tag=True):
    """How many weights are loaded, or how many parts are compiled, and how many there are in all."""

    done: int
    total: int


class Measured(msgspec.Struct, tag=True):
    """The weights are loaded. fingerprint: identifies the files that they come from."""

    capacity: Capacity
    fingerprint: str


class Ready(msgspec.Struct, tag=True):
    """The work that Agreed or Compile asked for is done."""


class Called(msgspec.Struct, tag=True):
    """A Call has ended. error: the class and the text of the exception that ended it. The worker goes on."""

    number: int
    error: tuple[str, str] | None = None


class Result(msgspec.Struct, tag=True):
    number: int
    result: BatchResult


class Pong(msgspec.Struct, tag=True):
    pass


class Log(msgspec.Struct, tag=True):
    """A line for the engine's log."""

    level: int
    message: str


class Failed(msgspec.Struct, tag=True):
    """An exception has ended the worker.

    in_exchange: whether the exception says that another worker could not be reached, which is then the likely cause.
    """

    kind: str
    message: str
    traceback: str
    in_exchange: bool


ToWorker = Start | Agreed | Run | Masks | Rest | Compile | Call | Ping | Stop
FromWorker = Progress | Measured | Ready | Called | Result | Pong | Log | Failed


def least(capacities: list[Capacity]) -> Capacity:
    """What every worker can hold."""
    return Capacity(
        capacities[0].device,
        capacities[0].dtype,
        min(capacity.num_blocks for capacity in capacities),
        min(capacity.num_host_blocks for capacity in capacities),
        min(capacity.max_model_len for capacity in capacities),
        capacities[0].windows,
    )


def _encode_array(array: Any) -> tuple[str, tuple[int, ...], Any]:
    """An array of an Item: its dtype, its shape and its bytes."""
    if not isinstance(array, np.ndarray):
        raise NotImplementedError
    return array.dtype.str, array.shape, np.ascontiguousarray(array).data


def _decode_array(kind: type, value: Any) -> np.ndarray:
    """Raises: ValueError, TypeError for what `_encode_array` has not made, also for arrays of Python objects."""
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
_decode_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=_decode_array).decode
_decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


def encode(message: ToWorker | FromWorker) -> bytes:
    return _encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises: msgspec.DecodeError if the bytes are not such a message; its subclass msgspec.ValidationError names the
    field."""
    with _refusing():
        return _decode_to_worker(data)


def decode_from_worker(data: bytes) -> FromWorker:
    """Raises: msgspec.DecodeError, as `decode_to_worker`."""
    with _refusing():
        return _decode_from_worker(data)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn other exceptions of msgspec into its DecodeError. It raises them for bytes that are nested too deeply, and
    for a tag that is not UTF-8."""
    try:
        yield
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None
