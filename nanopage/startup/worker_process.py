"""A worker in a process of its own: `python -m nanopage.startup.worker_process DESCRIPTOR`.

ProcessExecutor starts it.

One thread reads messages. It answers pings while the main thread computes, and ends the process when the connection
closes, so that no worker outlives its engine, however the engine ends.
"""

import logging
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from nanopage.distributed import messages
from nanopage.files.json_log import JSON_LOG, log_as_json
from nanopage.files.lossy_output import lose_output

if TYPE_CHECKING:
    from nanopage.worker.worker import Worker

# Words in the error of an exchange that another worker has broken.
EXCHANGES = ("gloo", "nccl", "connection closed", "connection reset", "socket", "timed out")


class Mailbox:
    """Exchanges messages with the executor.

    Args: connection: a Connection of multiprocessing, which only this object uses.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._messages: queue.SimpleQueue[messages.ToWorker] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of sending
        threading.Thread(target=self._read, daemon=True, name="nanopage-mailbox").start()

    def receive(self) -> messages.ToWorker:
        """Wait for the next message that is not a Ping."""
        return self._messages.get()

    def send(self, message: messages.FromWorker) -> None:
        data = messages.encode(message)
        with self._lock:
            self._connection.send_bytes(data)

    def _read(self) -> None:
        try:
            while True:
                message = messages.decode_to_worker(self._connection.recv_bytes())
                if isinstance(message, messages.Ping):
                    self.send(messages.Pong())
                else:
                    self._messages.put(message)
        except (EOFError, OSError):  # the engine has ended
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


class LogHandler(logging.Handler):
    """Sends what a worker logs to its executor. Of workers other than rank 0, only warnings and errors."""

    def __init__(self, mailbox: Mailbox, rank: int):
        super().__init__(logging.WARNING if rank else logging.INFO)
        self.mailbox, self.prefix = mailbox, f"rank {rank}: " if rank else ""

    def emit(self, record: logging.LogRecord) -> None:
        self.mailbox.send(messages.Log(record.levelno, self.prefix + self.format(record)))


def serve(connection: Connection) -> None:
    """Run a worker until it is told to stop."""
    mailbox = Mailbox(connection)
    try:
        _serve(mailbox)
    except Exception as error:
        text = f"{type(error).__name__} {error}".lower()
        in_exchange = isinstance(error, RuntimeError) and any(word in text for word in EXCHANGES)
        mailbox.send(messages.Failed(type(error).__name__, str(error), traceback.format_exc(), in_exchange))


def _serve(mailbox: Mailbox) -> None:
    start = mailbox.receive()
    assert isinstance(start, messages.Start)
    logger = logging.getLogger("nanopage")
    logger.setLevel(logging.INFO)
    logger.propagate, logger.handlers = False, [LogHandler(mailbox, start.rank)]

    # These take seconds, and pings are answered meanwhile.
    import torch

    from nanopage.device import resolve_device
    from nanopage.distributed.parallel import Ranks, part_of
    from nanopage.startup.worker import build_worker
    from nanopage.step import Capacity
    from nanopage.weights import loader
    from nanopage.worker.model_runner import Launched

    def report(done: int, total: int) -> None:
        if start.rank == 0:
            mailbox.send(messages.Progress(done, total))

    def agree(capacity: Capacity) -> Capacity:
        mailbox.send(messages.Measured(capacity, loader.fingerprint(checkpoint, start.config.load_format)))
        agreed = mailbox.receive()
        assert isinstance(agreed, messages.Agreed)
        return agreed.capacity

    def finish(number: int, launched: Launched) -> None:
        result = launched.result()
        if part.samples:
            mailbox.send(messages.Result(number, result))

    device = resolve_device(start.config.device)
    if device.type == "cuda":
        if start.local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ValueError(f"this worker needs GPU {start.local_rank}, and torch sees {count} here")
        device = torch.device("cuda", start.local_rank)
        torch.cuda.set_device(device)
    checkpoint = loader.open_checkpoint(Path(start.path))
    model_config = loader.read_config(checkpoint)
    part = part_of(start.config, start.rank)
    part.config(model_config)  # raises before the workers wait for each other
    ranks = Ranks(part, start.address, device)
    worker = build_worker(start.config, model_config, checkpoint, report, ranks, agree)
    mailbox.send(messages.Ready())
    number, launched = 0, None  # the last step
    while True:
        match mailbox.receive():
            case messages.Run(number, batch):
                launched = worker.launch(batch)
                if not batch.awaits_masks:
                    finish(number, launched)
            case messages.Masks(masks):
                assert launched is not None
                worker.runner.add_masks(launched, masks)
                finish(number, launched)
            case messages.Rest():
                worker.rest()
            case messages.Compile():
                worker.compile(report)
                mailbox.send(messages.Ready())
            case messages.Call() as call:
                mailbox.send(answer(call, worker))
            case messages.Stop():
                ranks.close()
                return


def answer(call: messages.Call, worker: "Worker") -> messages.Called:
    """Do what a message asks of a worker's standby. After an exception, the worker goes on."""
    try:
        getattr(worker.wings.standby, call.method)(worker, *call.arguments)
    except Exception as error:
        return messages.Called(call.number, (type(error).__name__, str(error)))
    return messages.Called(call.number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides
    if hasattr(signal, "SIGTTOU"):
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # output in the background, after "stty tostop"
    log_as_json() if os.environ.get(JSON_LOG) else lose_output()
    serve(Connection(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and threads of torch.distributed may still run
