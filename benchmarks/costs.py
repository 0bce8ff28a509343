"""How long a step takes on a machine: a model with few terms, fitted to steps that were measured, kept as JSON.

The time of a step is a sum of terms. Each term is a count of the batch times a number of seconds that is not negative:

    step                        every step
    tokens, tokens up to N      tokens, and the first N tokens: each further token can cost less
    tokens beyond N             tokens after the first N: each can cost more, for example once arithmetic takes longer
                                than reading the weights
    sequences, chunks, samples  rows of the batch; rows with several tokens; rows whose next token is sampled
    context                     tokens whose K and V are read by rows with one token
    chunk context               the same for the chunks of prompts
    chunk pairs                 query and key pairs of the chunks' attention

`fit` minimizes the squares of the relative errors. Imports no torch.
"""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checks import refuse, shown
from benchmarks.datasets import parse_json, read_text
from nanopage.step import Batch

BENDS = (2, 8, 32, 128, 512)  # numbers of tokens
TERMS = (
    "step",
    "sequences",
    "chunks",
    "samples",
    "context",
    "chunk context",
    "chunk pairs",
    "tokens",
    *(f"tokens up to {bend}" for bend in BENDS),
    *(f"tokens beyond {bend}" for bend in BENDS),
)
MIN_STEPS = 50  # the least steps for a fit
OUTLIER = 5  # standard deviations
POSITIVE = ("num_blocks", "block_size", "max_num_seqs", "tokens", "sequences", "context")  # integers in a file


def counts(batch: Batch) -> list[float]:
    """The count of each of TERMS in a batch."""
    num_rows, num_tokens = len(batch.rows), batch.num_tokens
    chunk_context, pairs = 0, 0.0
    singles = num_rows
    while singles and batch.counts[singles - 1] > 1:  # rows with one token come first
        singles -= 1
        start, count = batch.starts[singles], batch.counts[singles]
        chunk_context += start + count
        pairs += count * (start + (count + 1) / 2)
    context = sum(batch.starts[:singles]) + singles
    num_chunks = num_rows - singles
    return [1, num_rows, num_chunks, len(batch.sampled_rows), context, chunk_context, pairs, *bent(num_tokens)]


def bent(num_tokens: int) -> list[int]:
    """The terms that depend on `num_tokens` alone."""
    return [
        num_tokens,
        *(min(num_tokens, bend) for bend in BENDS),
        *(max(0, num_tokens - bend) for bend in BENDS),
    ]


@dataclass
class Costs:
    """The seconds of each term, and where they were measured.

    seconds: term -> seconds. A missing term costs nothing.
    machine: what a reader must know: processor, threads, model, dtype, versions.
    engine: num_blocks, block_size, max_num_seqs and device of the measured engine.
    measured: the largest step: tokens, sequences and context tokens of a sequence.
    fit: how well the terms fit: the number of measured steps, how many of them were left out, the relative errors of
        the others, and the predicted time of all steps divided by the measured time.
    """

    seconds: dict[str, float]
    machine: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)
    fit: dict[str, float] = field(default_factory=dict)

    @cached_property
    def _vector(self) -> list[float]:
        return [self.seconds.get(name, 0.0) for name in TERMS]

    @cached_property
    def _decodes(self) -> dict[int, tuple[float, float]]:
        return {}

    def decodes(self, num_seqs: int) -> tuple[float, float]:
        """(a, b): a step of `num_seqs` decodes takes a + b * context seconds."""
        known = self._decodes.get(num_seqs)
        if known is None:
            values = [1, num_seqs, 0, num_seqs, 0, 0, 0, *bent(num_seqs)]
            fixed = sum(a * b for a, b in zip(self._vector, values, strict=True))
            known = self._decodes[num_seqs] = fixed, self.seconds.get("context", 0.0)
        return known

    def of(self, batch: Batch) -> float:
        """Seconds that a step with this batch takes."""
        num_rows = len(batch.rows)
        if num_rows == len(batch.sampled_rows) and num_rows and batch.counts[-1] == 1:  # only decodes
            fixed, each = self.decodes(num_rows)
            return fixed + each * (sum(batch.starts) + num_rows)
        return sum(a * b for a, b in zip(self._vector, counts(batch), strict=True))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fit(rows: list[list[float]], seconds: list[float]) -> tuple[dict[str, float], dict[str, float]]:
    """Fit the seconds of each term to measured steps. Returns the seconds, and how well they fit.

    A second fit leaves out steps that are far off the first fit, such as after an interruption by another process.

    Args:
        rows: `counts` of each step.
        seconds: how long each step took.

    Raises: ValueError for fewer than MIN_STEPS steps.
    """
    if len(rows) < MIN_STEPS:
        raise ValueError(f"{len(rows)} steps are too few to fit costs to: needs {MIN_STEPS}")
    x, y = np.array(rows, float), np.array(seconds, float)
    kept = np.ones(len(y), bool)
    expected = y
    for _ in range(4):
        # Errors are relative to the expected time: relative to the measured time, they would favor short steps.
        solution = weighted_least_squares(x[kept], y[kept], 1 / expected[kept])
        expected = x @ solution
        errors = y / expected - 1
        middle = float(np.median(errors[kept]))
        spread = 1.4826 * float(np.median(np.abs(errors[kept] - middle)))
        kept = np.abs(errors - middle) <= max(0.1, OUTLIER * spread)
    errors = np.abs(expected / y - 1)
    terms = {name: float(value) for name, value in zip(TERMS, solution, strict=True) if value > 0}
    return terms, {
        "steps": len(y),
        "left out": int(np.sum(~kept)),
        "mean error": float(np.mean(errors[kept])),
        "P90 error": float(np.percentile(errors[kept], 90)),
        "predicted over measured": float(np.sum(expected) / np.sum(y)),
    }


def weighted_least_squares(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The s >= 0 that minimizes the sum of the squares of weights * (x s - y)."""
    weighted = x * weights[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0  # a term that no step has
    return non_negative_least_squares(weighted / scale, y * weights) / scale


def non_negative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimizes |a x - b|, by the active-set method of Lawson and Hanson (Solving Least Squares
    Problems, 1974, chapter 23). scipy has the same, but is not installed with nanopage."""
    num_terms = a.shape[1]
    free = np.zeros(num_terms, bool)  # the terms that are not held at 0
    x = np.zeros(num_terms)
    tolerance = 1e-10 * float(np.abs(a.T @ b).max())
    for _ in range(10 * num_terms):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(num_terms)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                break
            # Go from x towards trial until a term reaches 0, and hold that term at 0.
            steps = x[negative] / (x[negative] - trial[negative])
            x = x + float(steps.min()) * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = trial
    return x


class RememberingExecutor:
    """Wraps an executor: remembers the counts of each batch. A listener of the engine adds how long the step took.

    Only for engines without async scheduling, where each step is submitted and completed in one call.
    """

    def __init__(self, executor: Any):
        self.executor = executor
        self.rows: list[list[float]] = []
        self.seconds: list[float] = []
        self.max_context = 0  # tokens of the longest context of a sequence
        self._submitted: list[list[float]] = []  # submitted in this call of `LLMEngine.step`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def submit(self, batch: Batch) -> None:
        self._submitted.append(counts(batch))
        ends = [start + count for start, count in zip(batch.starts, batch.counts, strict=True)]
        self.max_context = max([self.max_context, *ends])
        self.executor.submit(batch)

    def after_step(self, stats: Any) -> None:
        """The listener. A step that failed and ran again is not kept."""
        if len(self._submitted) == 1:
            self.rows += self._submitted
            self.seconds.append(stats.seconds)
        self._submitted = []

    def forget(self) -> None:
        """Begin again."""
        self.rows, self.seconds, self.max_context = [], [], 0


def read_costs(path: Path) -> Costs:
    """Read the costs in a file of `bench.py costs --json`. Raises typer.BadParameter for any other file."""
    data = parse_json(read_text(path, "--costs"), str(path), "--costs")
    costs = data.get("costs") if isinstance(data, dict) else None
    if not isinstance(costs, dict):
        refuse(f"{path}: not a file of bench.py costs --json", "--costs")
    seconds = costs.get("seconds")
    if not isinstance(seconds, dict) or not seconds or not all(map(is_cost, seconds.values())):
        refuse(f'{path}: "seconds" must be terms with seconds that are not negative', "--costs")
    if unknown := [name for name in seconds if name not in TERMS]:
        refuse(f"{path}: the term {unknown[0]!r} is not known: measure again", "--costs")
    parts = {name: costs.get(name, {}) for name in ("machine", "engine", "measured", "fit")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            refuse(f'{path}: "{name}" must be an object', "--costs")
    for name, value in (parts["engine"] | parts["measured"]).items():
        if name in POSITIVE and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            refuse(f'{path}: "{name}" must be a positive integer, not {shown(value)}', "--costs")
    if (device := parts["engine"].get("device", "cpu")) not in ("cpu", "cuda"):
        refuse(f'{path}: "device" must be cpu or cuda, not {shown(device)}', "--costs")
    if not all(isinstance(value, str) for value in parts["machine"].values()):
        refuse(f'{path}: "machine" must have texts', "--costs")
    read = Costs({name: float(value) for name, value in seconds.items()}, **parts)
    if not read.decodes(1)[0]:  # the clock would never reach the next request
        refuse(f"{path}: a step of one token must take some time", "--costs")
    return read


def is_cost(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
