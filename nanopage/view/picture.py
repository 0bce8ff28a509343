"""Reads the frames that frames.py describes: the state after each frame, and recordings. It needs no engine."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

VERSION = 1  # of recordings

Frame = dict[str, Any]


@dataclass
class Request:
    """A request in a picture. The fields are as in frames."""

    number: int
    prompt: int
    most: int
    completions: int
    beams: bool
    priority: int
    tokens: int = 0
    computed: int = 0
    preemptions: int = 0
    items: list[list[int]] = field(default_factory=list)


class Picture:
    """The state that the frames so far describe.

    Attributes:
        requests: number -> Request, of unfinished requests.
        queues: numbers of waiting, running and swapped requests.
        tables, host: sequence -> (request, blocks).
        cached: the cached blocks.
        encoder: as in frames; empty before anything was encoded.
        last: the last frame.
        output_tokens, preempted, hit_tokens, prompt_tokens: totals since the first frame.
    """

    def __init__(self) -> None:
        self.last: Frame = {}
        self.key: Frame = {}
        self.encoder: tuple[int, ...] = ()
        self.output_tokens = self.preempted = self.hit_tokens = self.prompt_tokens = 0

    def apply(self, frame: Frame) -> None:
        """Raises: ValueError if a step frame comes before a key frame."""
        if frame["frame"] == "key":
            self.key = frame
            self.requests: dict[int, Request] = {}
            self.tables = {seq: (owner, list(blocks)) for seq, owner, blocks in frame["tables"]}
            self.host = {seq: (owner, blocks) for seq, owner, blocks in frame["host"]}
            self.cached = set(frame["cached"])
        elif not self.key:
            raise ValueError("the first frame is not a key frame")
        self.last = frame
        self.requests |= {request[0]: Request(*request) for request in frame.get("requests", ())}
        self.queues: list[list[int]] = frame.get("queues") or self.queues
        for number, tokens, computed, preemptions in frame.get("progress", ()):
            request = self.requests[number]
            request.tokens, request.computed, request.preemptions = tokens, computed, preemptions
        if frame["frame"] == "step":
            self._apply_step(frame)

    def _apply_step(self, frame: Frame) -> None:
        for kind, number in frame["events"]:
            self.preempted += kind in ("preempted", "swapped out")
            if kind == "finished":
                self.requests.pop(number, None)
        self.encoder = tuple(frame.get("encoder", self.encoder))
        prefill, _, output, cached = frame["tokens"]
        self.output_tokens, self.prompt_tokens = self.output_tokens + output, self.prompt_tokens + prefill + cached
        self.hit_tokens += cached
        for seq in frame.get("gone", ()):
            del self.tables[seq]
        for seq, owner, first, blocks in frame["tables"]:
            before = self.tables[seq][1] if seq in self.tables else []
            self.tables[seq] = (owner, before[:first] + blocks)
        for seq in frame.get("host_gone", ()):
            del self.host[seq]
        self.host |= {seq: (owner, blocks) for seq, owner, blocks in frame.get("host", ())}
        self.cached -= set(frame.get("uncached", ()))
        self.cached |= set(frame.get("cached", ()))

    def owners(self) -> dict[int, list[int]]:
        """Block -> the requests whose sequences have it in their tables, one for each sequence."""
        owners: dict[int, list[int]] = {}
        for owner, blocks in self.tables.values():
            for block in blocks:
                owners.setdefault(block, []).append(owner)
        return owners


def read_recording(file: Path) -> Iterator[Frame]:
    """The frames of a recording, plain or gzipped.

    Raises: ValueError that names the file and the line, OSError.
    """
    number = 1
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else open(file, "rb") as lines:
            for line in lines:
                frame = msgspec.json.decode(line)
                if number == 1 and (frame["frame"], frame["version"]) != ("key", VERSION):
                    raise ValueError(f"not a recording of version {VERSION}")
                if frame["frame"] not in ("key", "step", "plan"):
                    raise ValueError(f"{frame['frame']!r} is no kind of frame")
                yield frame
                number += 1
    except (ValueError, TypeError, KeyError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{file}, line {number}: {type(error).__name__}: {error}") from None
