"""`nanopage run-batch`: the requests of a file to a file of replies, both in the form of OpenAI's Batch API.

Each line is a call of the server's own application in this process, so replies are those of the server. Enough lines
are in flight to fill the engine's batches, but never more, whatever the length of the file. Replies are written as they
come.
"""

import argparse
import asyncio
import concurrent.futures
import os
import stat
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any, BinaryIO

import msgspec
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from starlette.types import ASGIApp

from nanopage.aio.async_llm import AsyncLLM
from nanopage.server.app import create_app
from nanopage.server.batch_files import Line, LineError, OutputFile, name_of, open_input, read_line, read_lines
from nanopage.server.in_process import post
from nanopage.server.option_sources import read_options
from nanopage.server.options import Model, add_model_options
from nanopage.server.state import ServerState
from nanopage.terminal.signals import orderly_exit
from nanopage.terminal.spinner import spinner
from nanopage.terminal.text import say, say_log, stderr
from nanopage.vllm.engine_args import EngineArgs, FlexibleArgumentParser
from nanopage.vllm.metrics import Counter

LINES_PER_SEQUENCE = 2  # in flight: the next ones are ready when sequences end
MAX_HELD = 64 << 20  # bytes of the lines in flight, unless there is only one
UNLIMITED = 1 << 60  # nothing but these two bounds what waits


def main(arguments: list[str]) -> int:
    """Answer the lines of a file. Returns the program's exit code: 0 all answered, 1 at least one has an error."""
    args = read_options(parser(), arguments, {})
    model = Model(args)
    say_log(verbose=False)
    state = ServerState(**model.settings, max_queue=UNLIMITED, max_queue_tokens=UNLIMITED, strict_fields=True)
    source = open_input(args.input_file)  # never closed: a thread may be waiting for a line of it
    with orderly_exit(), closing(OutputFile(args.output_file)) as output:
        with spinner(f"Loading {state.model_names[0]}"):
            llm = model.load(state)
        run = BatchRun(create_app(state), llm, source, output)
        try:
            asyncio.run(run.all())
        finally:
            llm.shutdown()
            say(run.summary())
    return 1 if output.num_failed + run.num_failed else 0


def parser() -> argparse.ArgumentParser:
    """The options: the files, then those of `nanopage serve` for the model and the engine."""
    parser = FlexibleArgumentParser(
        prog="nanopage run-batch",
        usage="%(prog)s [MODEL] -i FILE -o FILE [options]",
        description="Answer the requests of a file in the form of OpenAI's Batch API. Started again with the same "
        "files, it goes on where it was stopped.",
        epilog="Exit codes: 0 all answered, 1 at least one line has an error, 2 wrong usage, 130 stopped by Ctrl-C, "
        "128 + N ended by signal N.",
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines; - is stdin")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="gets the replies; - is stdout")
    add_model_options(parser)
    EngineArgs.add_cli_args(parser.add_argument_group("engine"))
    return parser


class BatchRun:
    """A run over the lines of a file.

    Args:
        app: the server's application, around `llm`.
        output: says which lines an earlier run has answered.
    """

    def __init__(self, app: ASGIApp, llm: AsyncLLM, source: BinaryIO, output: OutputFile):
        self.app, self.llm, self.source, self.output = app, llm, source, output
        self.max_lines = LINES_PER_SEQUENCE * llm.engine.config.max_num_seqs
        self.num_before, self.num_answered, self.num_failed = len(output.done), 0, 0
        self.goes_on = True  # if it is started again
        self._names: set[str | None] = set()  # the custom_ids so far
        self._in_flight = self._held = 0  # lines, and their bytes
        self._room = asyncio.Event()
        self._advance: Callable[[int], None] = lambda size: None  # the progress bar, by bytes of the input
        self._started = time.monotonic()

    async def all(self) -> None:
        """Answer all lines that have no answer yet. Raises: ValueError if the output belongs to another input;
        EngineDeadError; OSError."""
        status = os.fstat(self.source.fileno())
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, *times, console=stderr, disable=not stderr.is_terminal) as progress:
            is_file = stat.S_ISREG(status.st_mode)
            task = progress.add_task("", total=status.st_size if is_file else None)

            def advance(size: int) -> None:
                count = f"{self.num_before + self.num_answered + self.num_failed:,} lines"
                progress.update(task, advance=size, description=count)

            self._advance = advance
            try:
                async with asyncio.TaskGroup() as group:
                    async for number, text in _lines(self.source, may_block=not is_file):
                        if (line := self._begin(number, text)) is None:
                            advance(len(text))
                            await asyncio.sleep(0)  # many such lines do not keep replies waiting
                            continue
                        await self._enter(len(text))
                        group.create_task(self._answer(number, line, len(text)))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
        if self.output.done:
            raise self._other_input(min(self.output.done))
        self.goes_on = False

    def _begin(self, number: int, text: bytes) -> Line | None:
        """The request of a line; None if it has an answer already, or now has an error."""
        custom_id, done = name_of(text), self.output.done
        if number in done:
            if done.pop(number) != custom_id:
                raise self._other_input(number)
            self._names.add(custom_id)
            return None
        try:
            line = read_line(text)
            if custom_id in self._names:
                raise LineError("duplicate_custom_id", "an earlier line has this custom_id")
            return line
        except LineError as error:
            self.num_failed += 1
            self.output.write(number, custom_id, None, {"code": error.code, "message": str(error)})
            return None
        finally:
            self._names.add(custom_id)

    async def _enter(self, size: int) -> None:
        """Wait until there is room for another line."""
        while self._in_flight and (self._in_flight >= self.max_lines or self._held + size > MAX_HELD):
            self._room.clear()
            await self._room.wait()
        self._in_flight += 1
        self._held += size

    async def _answer(self, number: int, line: Line, size: int) -> None:
        try:
            status, body = await post(self.app, line.url, bytes(line.body))
            if self.llm.dead_error is not None:  # the line is for the next run
                raise self.llm.dead_error
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": msgspec.Raw(body)}
            self.output.write(number, line.custom_id, response, None)
            self.num_answered += status == 200
            self.num_failed += status != 200
        finally:
            self._in_flight -= 1
            self._held -= size
            self._room.set()
            self._advance(size)

    def _other_input(self, number: int) -> ValueError:
        self.goes_on = False
        return ValueError(
            f"{self.output.name} has an answer to another line {number} than the input's: give the files that belong "
            "together, or another --output-file"
        )

    def summary(self) -> str:
        """What this run has done, as a line."""
        seconds = time.monotonic() - self._started
        counts = {metric.name: metric.value for metric in self.llm.get_metrics() if isinstance(metric, Counter)}
        tokens, before = counts["vllm:generation_tokens"], ""
        if self.num_before:
            before = f", {self.num_before:,} by earlier runs ({self.output.num_failed:,} with errors)"
        return (
            f"{self.num_answered:,} lines answered, {self.num_failed:,} with errors{before}; {seconds:,.1f} s, "
            f"{counts['vllm:prompt_tokens']:,} prompt tokens, {tokens:,} generated ({tokens / seconds:,.0f}/s)"
            + ("; stopped: the same command goes on from here" if self.goes_on else "")
        )


async def _lines(file: BinaryIO, may_block: bool) -> AsyncIterator[tuple[int, bytes]]:
    """As `read_lines`, for an event loop. Args: may_block: the file is a pipe, whose lines may take any time."""
    lines = read_lines(file)
    while (line := await _in_daemon(next, lines, None) if may_block else next(lines, None)) is not None:
        yield line


async def _in_daemon(function: Callable, *args: Any) -> Any:
    """The result of a function that may block for ever. The end of the program does not wait for its thread."""
    done: concurrent.futures.Future = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # the thread may set a result after the caller was cancelled

    def work() -> None:
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(done)
