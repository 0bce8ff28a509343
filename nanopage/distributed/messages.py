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
Rest               ─▶                         (no request is left)
Stop               ─▶
Ping               ─▶                         (at any time)
                   ◀─   Pong
                   ◀─   Log, Failed
"""

import contextlib
from collections.abc import Iterator

import msgspec

from nanopage.config.options import EngineConfig
from nanopage.step import Batch, BatchResult, Capacity


class Start(msgspec.Struct, tag=True):
    """Load a part of a model.

    path: of the model. address: where the workers meet (see `Ranks`). local_rank: the worker's GPU, if it has one.
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
    """number: of the batch, which its Result has as well."""

    number: int
    batch: Batch


class Masks(msgspec.Struct, tag=True):
    """The rest of the masks of the last batch (see `Executor.add_masks`)."""

    masks: dict[int, bytes]


class Rest(msgspec.Struct, tag=True):
    pass


class Compile(msgspec.Struct, tag=True):
    pass


class Ping(msgspec.Struct, tag=True):
    pass


class Stop(msgspec.Struct, tag=True):
    pass


class Progress(msgspec.Struct, tag=True):
    """How many weights are loaded, or parts compiled, and of how many."""

    done: int
    total: int


class Measured(msgspec.Struct, tag=True):
    """The weights are loaded. fingerprint: of the files that they come from."""

    capacity: Capacity
    fingerprint: str


class Ready(msgspec.Struct, tag=True):
    """What Agreed or Compile has asked for is done."""


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

    in_exchange: whether it says that another worker could not be reached, so that the cause is probably there.
    """

    kind: str
    message: str
    traceback: str
    in_exchange: bool


ToWorker = Start | Agreed | Run | Masks | Rest | Compile | Ping | Stop
FromWorker = Progress | Measured | Ready | Result | Pong | Log | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
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
    """Turn what msgspec raises for bytes that are nested too deeply, or for a tag that is not UTF-8, into its
    DecodeError."""
    try:
        yield
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None
