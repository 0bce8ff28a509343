"""The data of requests: random prompts, a file of prompts, ShareGPT conversations, or a trace with arrival times.

Files are read before a model is loaded. A refusal names the file and the line. Names and rules are as in `vllm bench`.
"""

import itertools
import json
import random
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checks import MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, check_choice, refuse, shown
from benchmarks.peers.nanopage import random_prompt
from benchmarks.peers.protocol import Work
from benchmarks.report import console

NAMES = ("random", "sharegpt", "custom")
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 32, "32-256", "32-128"  # unless an option or a file says otherwise
MAX_FILE_BYTES = 2**30
MAX_CHARACTERS = 10_000_000  # of a prompt or an answer: far more than any context holds
OUTPUT_FIELDS = ("output_len", "output_tokens", "max_tokens")


@dataclass
class Entry:
    """A request in a file. `output` is a number of tokens, or a text that has this number."""

    where: str  # file and line, for messages
    prompt: str | list[int]
    output: str | int | None


@dataclass
class Requests:
    """Requests whose lengths are known: tokens in and out of each."""

    lengths: list[tuple[int, int]]
    options: list[str]  # the options that set the lengths
    prompts: list[list[int]] | None = None  # None: random
    prefix_len: int = 0  # common to all random prompts; part of their lengths
    arrivals: list[float] | None = None  # of a trace: seconds after the first

    def work(self, rng: random.Random, engine: Any) -> list[Work]:
        """The requests. Random prompts and their prefix are new in every call."""
        if self.prompts is not None:
            return [Work(prompt, o) for prompt, (_, o) in zip(self.prompts, self.lengths, strict=True)]
        prefix = random_prompt(rng, engine, self.prefix_len)
        return [Work(prefix + random_prompt(rng, engine, i - self.prefix_len), o) for i, o in self.lengths]


@dataclass
class Dataset:
    """Where requests come from, checked as far as possible without the model."""

    what: str  # for the header
    num_prompts: int | None  # None: all that the file has
    input_range: tuple[int, int] = (0, 0)
    output_range: tuple[int, int] = (0, 0)
    prefix_len: int = 0
    entries: list[Entry] | None = None
    sharegpt: bool = False
    override_output: bool = False  # --output-len was given: it overrides the file

    @property
    def count(self) -> int:
        """How many requests there will be; for ShareGPT, the most there can be."""
        return self.num_prompts or len(self.entries or ())

    def requests(self, rng: random.Random, model_path: Path) -> Requests:
        """Draw the lengths, or find them with the model's tokenizer. Raises what the tokenizer raises."""
        if self.entries is None:
            assert self.num_prompts is not None
            lengths = [
                (rng.randint(*self.input_range), rng.randint(*self.output_range)) for _ in range(self.num_prompts)
            ]
            options = ["--input-len", "--output-len"] + ["--prefix-len"] * bool(self.prefix_len)
            return Requests([(self.prefix_len + i, o) for i, o in lengths], options, prefix_len=self.prefix_len)
        if self.sharegpt:
            rng.shuffle(self.entries)
        with console.status(f"tokenizing up to {self.count:,} prompts"):
            usable = list(itertools.islice(self._encoded(self.entries, rng, model_path), self.num_prompts))
        if len(usable) < (self.num_prompts or 1):
            count = f"{len(usable)} prompts that can be used" if usable else "no prompt that can be used"
            refuse(f"the file has {count}", "--num-prompts" if usable else "--dataset-path")
        return Requests([(len(p), o) for p, o in usable], ["--dataset-path"], [p for p, _ in usable])

    def _encoded(self, entries: list[Entry], rng: random.Random, model_path: Path) -> Iterator[tuple[list[int], int]]:
        from nanopage.text.tokenizer import Tokenizer
        from nanopage.weights import loader

        checkpoint = loader.open_checkpoint(model_path)
        vocab_size = loader.read_config(checkpoint).vocab_size
        has_text = any(isinstance(entry.prompt, str) for entry in entries)
        encode = Tokenizer(checkpoint).encode if has_text else None
        for entry in entries:
            prompt = encode(entry.prompt) if encode and isinstance(entry.prompt, str) else entry.prompt
            assert isinstance(prompt, list)
            if not prompt:
                refuse(f"{entry.where}: the prompt has no tokens", "--dataset-path")
            if (largest := max(prompt)) >= vocab_size:
                message = f"token id {shown(largest)} is not in the vocabulary of {vocab_size} tokens"
                refuse(f"{entry.where}: {message}", "--dataset-path")
            if self.override_output or entry.output is None:
                output = rng.randint(*self.output_range)
            elif isinstance(entry.output, str):
                output = len(encode(entry.output)) if encode else 0
            else:
                output = entry.output
            short = len(prompt) < 4 or (output < 4 and not self.override_output)
            if self.sharegpt and (short or len(prompt) > 1024 or len(prompt) + output > 2048):
                continue
            yield prompt, output


def dataset(
    name: str,
    path: Path | None,
    num_prompts: int | None,
    input_len: str | None,
    output_len: str | None,
    prefix_len: int,
) -> Dataset:
    """Check the options of the data, and read its file. Raises typer.BadParameter.

    random    prompts of --prefix-len common tokens and --input-len own ones
    custom    one prompt a line; in a file *.jsonl an object a line, with prompt (text) or prompt_token_ids, and
              optionally output_len (or output_tokens, max_tokens); other fields are not read
    sharegpt  JSON: [{"conversations": [{"value": text}, ...]}, ...], in random order. The first turn is the prompt, and
              the output has as many tokens as the second turn, or --output-len. As in vLLM, these are left out:
              conversations of fewer than two turns, prompts of fewer than 4 tokens or more than 1024, outputs of fewer
              than 4 tokens (unless --output-len is given), and more than 2048 tokens in all
    """
    check_choice(name, NAMES, "--dataset-name")
    output_range = parse_range("--output-len", OUTPUT_LEN if output_len is None else output_len)
    if name == "random":
        if path is not None:
            refuse("needs --dataset-name sharegpt or custom", "--dataset-path")
        count = num_prompts or NUM_PROMPTS
        input_range = parse_range("--input-len", INPUT_LEN if input_len is None else input_len)
        prefix = f"{prefix_len} common tokens and " if prefix_len else ""
        what = f"{count} requests, input {prefix}{input_len or INPUT_LEN}, output {output_len or OUTPUT_LEN}"
        return Dataset(what, count, input_range, output_range, prefix_len)
    if path is None:
        refuse(f"--dataset-name {name} needs a file", "--dataset-path")
    if input_len is not None or prefix_len:
        option = "--prefix-len" if input_len is None else "--input-len"
        refuse(f"is for random prompts, not for --dataset-name {name}", option)
    entries = read_sharegpt(path) if name == "sharegpt" else read_prompts(path)
    if not entries:
        missing = "conversations of two turns" if name == "sharegpt" else "prompts"
        refuse(f"{path} has no {missing}", "--dataset-path")
    if len(entries) > MAX_REQUESTS and num_prompts is None:
        refuse(f"{path} has {len(entries):,} prompts: say how many of them to run", "--num-prompts")
    if len(entries) < (num_prompts or 0):
        refuse(f"{path} has only {len(entries)}", "--num-prompts")
    what = f"{num_prompts or 'all'} requests of {path.name} ({name}), output {output_len or 'as the file says'}"
    given = output_len is not None
    return Dataset(what, num_prompts, (0, 0), output_range, 0, entries, name == "sharegpt", given)


def read_sharegpt(path: Path) -> list[Entry]:
    """Conversations of at least two turns."""
    option = "--dataset-path"
    conversations = parse_json(read_text(path, option), str(path), option)
    if not isinstance(conversations, list):
        refuse(f"{path}: not a list of conversations", option)
    entries = []
    for i, conversation in enumerate(conversations):
        where = f"{path}, conversation {i}"
        if not isinstance(conversation, dict):
            refuse(f"{where}: not an object", option)
        turns = conversation.get("conversations", [])
        if not isinstance(turns, list):
            refuse(f'{where}: "conversations" is not a list', option)
        values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        for value in values:
            if not isinstance(value, str):
                refuse(f'{where}: a turn without a text "value"', option)
            check_text(value, where, option)
        if len(values) == 2 and values[0]:
            entries.append(Entry(where, values[0], values[1]))
    return entries


def read_prompts(path: Path) -> list[Entry]:
    option = "--dataset-path"
    entries = []
    if path.suffix != ".jsonl":
        for number, line in enumerate(read_text(path, option).split("\n"), 1):
            if line.strip():
                entries.append(Entry(f"{path}, line {number}", line, None))
                check_text(line, entries[-1].where, option)
        return entries
    for where, fields in read_json_lines(path, option):
        forms = [name for name in ("prompt", "prompt_token_ids") if name in fields]
        if len(forms) != 1:
            refuse(f'{where}: needs "prompt" or "prompt_token_ids", one of them', option)
        prompt = fields[forms[0]]
        if forms == ["prompt"]:
            if not (isinstance(prompt, str) and prompt):
                refuse(f'{where}: "prompt" must be a text, not {shown(prompt)}', option)
            check_text(prompt, where, option)
        elif not (isinstance(prompt, list) and prompt and all(map(is_token_id, prompt))):
            refuse(f'{where}: "prompt_token_ids" must be a list of token ids', option)
        outputs = [name for name in OUTPUT_FIELDS if name in fields]
        if len(outputs) > 1:
            refuse(f"{where}: {' and '.join(outputs)} mean the same: give one", option)
        output = positive(where, fields, outputs[0], option) if outputs else None
        entries.append(Entry(where, prompt, output))
    return entries


def read_trace(path: Path, num_prompts: int | None) -> Requests:
    """The first `num_prompts` requests of a trace, by default all, with random prompts. A trace has JSON lines with
    timestamp (seconds, not falling), input_length and output_length, as Mooncake's; other fields are not read."""
    lengths: list[tuple[int, int]] = []
    arrivals: list[float] = []
    for where, fields in read_json_lines(path, "--trace"):
        arrivals.append(read_timestamp(where, fields, arrivals))
        in_out = [positive(where, fields, name, "--trace") for name in ("input_length", "output_length")]
        lengths.append((in_out[0], in_out[1]))
    if not lengths:
        refuse(f"{path} has no requests", "--trace")
    if len(lengths) < (num_prompts or 0):
        refuse(f"{path} has only {len(lengths)}", "--num-prompts")
    if len(lengths) > MAX_REQUESTS and num_prompts is None:
        refuse(f"{path} has {len(lengths):,} requests: say how many of them to run", "--num-prompts")
    arrivals = [time - arrivals[0] for time in arrivals[:num_prompts]]
    return Requests(lengths[:num_prompts], ["--trace"], arrivals=arrivals)


def read_timestamp(where: str, fields: dict, before: list[float]) -> float:
    """Seconds, not less than the last of `before` and not much later than the first."""
    time = fields.get("timestamp")
    if not isinstance(time, int | float) or isinstance(time, bool) or not 0 <= time <= sys.float_info.max:
        refuse(f'{where}: "timestamp" must be a number of seconds, not {shown(time)}', "--trace")
    if before and time < before[-1]:
        refuse(f'{where}: "timestamp" {shown(time)} is before the line above, {before[-1]}', "--trace")
    if before and time - before[0] > MAX_SECONDS:
        span = f"{time - before[0]:.3g} s after the first, more than a week"
        refuse(f'{where}: "timestamp" {shown(time)} is {span}: timestamps are in seconds', "--trace")
    return float(time)


def read_json_lines(path: Path, option: str) -> Iterator[tuple[str, dict]]:
    """(file and line, object) for every line that is not empty."""
    for number, line in enumerate(read_text(path, option).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        fields = parse_json(line, where, option)
        if not isinstance(fields, dict):
            refuse(f"{where}: not an object", option)
        yield where, fields


def parse_json(text: str, where: str, option: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text else ""
        refuse(f"{where}{line}: not JSON: {error.msg}", option)
    except RecursionError:
        refuse(f"{where}: lists or objects are nested too deeply", option)
    except ValueError:
        refuse(f"{where}: an integer of more than {sys.get_int_max_str_digits()} digits", option)


def read_text(path: Path, option: str) -> str:
    """The contents of a regular file of a bounded size: a FIFO or a device may never end."""
    try:
        path = path.expanduser()
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            refuse(f"{path}: not a regular file", option)
        if status.st_size > MAX_FILE_BYTES:
            refuse(f"{path}: {status.st_size / 2**30:.1f} GiB are more than {MAX_FILE_BYTES // 2**30} GiB", option)
        with console.status(f"reading {status.st_size / 1e6:.0f} MB"):
            return path.read_text("utf-8")
    except OSError as error:
        refuse(f"{path}: {error.strerror}", option)
    except RuntimeError as error:  # "~name" without a user of that name
        refuse(f"{path}: {error}", option)
    except UnicodeDecodeError:
        refuse(f"{path}: not a text in UTF-8", option)


def check_text(text: str, where: str, option: str) -> None:
    """Refuse what a tokenizer cannot take."""
    if len(text) > MAX_CHARACTERS:
        refuse(f"{where}: a text of {len(text):,} characters, more than {MAX_CHARACTERS:,}", option)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        refuse(f"{where}: half a surrogate pair, {shown(text[error.start])}, is no character", option)


def positive(where: str, fields: dict, name: str, option: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        most = f" of at most {MAX_TOKENS:,}" if isinstance(value, int) and value > MAX_TOKENS else ""
        refuse(f'{where}: "{name}" must be a positive integer{most}, not {shown(value)}', option)
    return value


def is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse_range(option: str, text: str) -> tuple[int, int]:
    """ "128" -> (128, 128), "32-256" -> (32, 256)."""
    low, dash, high = text.partition("-")
    try:
        bounds = int(low), int(high if dash else low)
    except ValueError:
        refuse(f"{shown(text)} is not a number or LOW-HIGH", option)
    if not 1 <= bounds[0] <= bounds[1]:
        refuse(f"{shown(text)}: needs 1 <= LOW <= HIGH", option)
    if bounds[1] > MAX_TOKENS:
        refuse(f"{shown(text)}: at most {MAX_TOKENS:,} tokens", option)
    return bounds
