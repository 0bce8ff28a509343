"""Traces that `bench.py simulate` replays: the arrivals and lengths of requests, and what their prompts share.

    *.csv    Azure's: TIMESTAMP (a date and a time), ContextTokens, GeneratedTokens. Prompts share nothing
    *.jsonl  Mooncake's: timestamp (milliseconds), input_length, output_length, hash_ids. Each id names 512 tokens of
             the prompt and everything before them; the last one may name fewer

Other columns and fields are not read. Files are refused by name and line.
"""

import csv
import io
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from benchmarks.checks import MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, refuse, shown
from benchmarks.datasets import is_token_id, positive, read_json_lines, read_text

PART_TOKENS = 512  # tokens that an id in Mooncake's traces names
MAX_ID = 2**40  # the largest id of a part
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(slots=True)
class Request:
    """A request of a trace.

    number: its place in the trace, from 0.
    arrival: seconds after the first request.
    hash_ids, shift: the parts of its prompt, each `hash_id + shift`. Empty if it shares nothing.
    """

    number: int
    arrival: float
    input_len: int
    output_len: int
    hash_ids: list[int]
    shift: int = 0

    @property
    def num_tokens(self) -> int:
        return self.input_len + self.output_len

    @property
    def own_token(self) -> int:
        """A token id that no other request has."""
        return 2 * self.number + 1

    def prompt(self, part_tokens: int) -> list[int]:
        """Token ids. Two requests have the same ids exactly where their parts are the same."""
        tokens: list[int] = []
        for part in self.hash_ids:
            tokens += [2 * (part + self.shift)] * part_tokens
        del tokens[self.input_len :]
        return tokens + [self.own_token] * (self.input_len - len(tokens))

    def parts(self, part_tokens: int) -> list[int]:
        """The names of the full parts of the prompt, for a router."""
        return [part + self.shift for part in self.hash_ids[: self.input_len // part_tokens]]


@dataclass
class Trace:
    """Requests in the order of their arrival. `part_tokens`: how many tokens each of their `hash_ids` names."""

    requests: list[Request]
    part_tokens: int = PART_TOKENS


def read_trace(path: Path, count: int | None = None, speed: float = 1.0, repeat: int = 1) -> Trace:
    """Read a trace. Raises typer.BadParameter for a file that is not one, by file and line.

    Args:
        count: how many requests to take, after repeating. None: all.
        speed: how many times as fast they arrive.
        repeat: how many times the trace is played, one after another. Prompts share parts only within one playing.
    """
    requests = read_azure(path) if path.suffix == ".csv" else read_mooncake(path)
    if not requests:
        refuse(f"{path} has no requests", "--trace")
    if len(requests) * repeat < (count or 0):
        refuse(f"{path} has only {len(requests) * repeat:,}", "--num-prompts")
    if (count or len(requests) * repeat) > MAX_REQUESTS:
        refuse(f"{len(requests) * repeat:,} requests are more than {MAX_REQUESTS:,}", "--num-prompts")
    # The gap between two playings is the mean gap within one.
    span = requests[-1].arrival * len(requests) / max(1, len(requests) - 1)
    ids = 1 + max((max(request.hash_ids) for request in requests if request.hash_ids), default=0)
    played = [
        replace(
            request,
            number=time * len(requests) + request.number,
            arrival=(time * span + request.arrival) / speed,
            shift=time * ids,
        )
        for time in range(repeat)
        for request in requests
    ][:count]
    if played[-1].arrival > MAX_SECONDS * max(1, repeat):
        refuse(f"at {speed:g} the requests take {played[-1].arrival:.3g} s to arrive, over a week", "--speed")
    return Trace(played)


def read_azure(path: Path) -> list[Request]:
    lines = csv.reader(io.StringIO(read_text(path, "--trace")))
    header = next(lines, [])
    if missing := [name for name in AZURE if name not in header]:
        refuse(f"{path}, line 1: no column {missing[0]}", "--trace")
    columns = [header.index(name) for name in AZURE]
    requests: list[Request] = []
    started = before = datetime.min
    for line in lines:
        where = f"{path}, line {lines.line_num}"
        if not line:
            continue
        if len(line) <= max(columns):
            refuse(f"{where}: {len(line)} columns instead of {len(header)}", "--trace")
        timestamp, *lengths = (line[column] for column in columns)
        try:
            time = datetime.fromisoformat(timestamp)
            arrival = (time - (started if requests else time)).total_seconds()
        except (ValueError, TypeError):  # TypeError: only one of the two has a time zone
            refuse(f"{where}: TIMESTAMP {shown(timestamp)} is not a date and a time as in the first line", "--trace")
        if requests and time < before:
            refuse(f"{where}: TIMESTAMP {shown(timestamp)} is before the line above", "--trace")
        if not requests:
            started = time
        before = time
        counts = []
        for name, text in zip(AZURE[1:], lengths, strict=True):
            if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MAX_TOKENS):
                refuse(f"{where}: {name} must be a positive integer, not {shown(text)}", "--trace")
            counts.append(int(text))
        requests.append(Request(len(requests), arrival, counts[0], counts[1], []))
        check_span(where, arrival)
    return requests


def read_mooncake(path: Path) -> list[Request]:
    requests: list[Request] = []
    started = before = 0.0
    for where, fields in read_json_lines(path, "--trace"):
        time = fields.get("timestamp")
        if not isinstance(time, int | float) or isinstance(time, bool) or not 0 <= time < 1e15:
            refuse(f'{where}: "timestamp" must be a number of milliseconds, not {shown(time)}', "--trace")
        if requests and time < before:
            refuse(f'{where}: "timestamp" {shown(time)} is before the line above', "--trace")
        if not requests:
            started = time
        before = time
        input_len, output_len = (positive(where, fields, name, "--trace") for name in ("input_length", "output_length"))
        hash_ids = fields.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(is_token_id(part) and part < MAX_ID for part in hash_ids):
            refuse(f'{where}: "hash_ids" must be a list of integers from 0 on', "--trace")
        if len(hash_ids) > -(-input_len // PART_TOKENS):
            refuse(f'{where}: {len(hash_ids)} "hash_ids" are too many for {input_len} tokens', "--trace")
        requests.append(Request(len(requests), (time - started) / 1000, input_len, output_len, hash_ids))
        check_span(where, requests[-1].arrival)
    return requests


def check_span(where: str, arrival: float) -> None:
    if arrival > MAX_SECONDS:
        refuse(f"{where}: {arrival:.3g} s after the first request, more than a week", "--trace")
