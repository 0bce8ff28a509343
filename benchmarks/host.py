"""What a step costs the host (Python), measured with a batch of decodes of a model of one small layer."""

import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import figure, show_table, table_of

PROMPT_LEN, NUM_STEPS = 16, 64
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# Ways to use the engine: without text, with text when a request ends, and with text after every token.
USES = {"token ids": (False, True), "final text": (True, True), "streamed text": (True, False)}
# Row of the table -> field of StepStats.
PARTS = {
    "schedule": "schedule_seconds",
    "prepare inputs": "prepare_seconds",
    "take in results": "update_seconds",
    "text and outputs": "output_seconds",
}


class ThroughBytes:
    """Wraps an executor: converts messages to bytes and back, as between processes. Adds up the time for that."""

    def __init__(self, executor: Any):
        self.executor, self.seconds, self.num_bytes = executor, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def submit(self, batch: Any) -> None:
        from nanopage.distributed import messages

        started = time.perf_counter()
        data = messages.encode(messages.Run(0, batch))
        message = messages.decode_to_worker(data)
        assert isinstance(message, messages.Run)
        self.seconds, self.num_bytes = self.seconds + time.perf_counter() - started, len(data)
        self.executor.submit(message.batch)

    def result(self) -> Any:
        from nanopage.distributed import messages

        result = self.executor.result()
        started = time.perf_counter()
        message = messages.decode_from_worker(messages.encode(messages.Result(0, result)))
        self.seconds += time.perf_counter() - started
        assert isinstance(message, messages.Result)
        return message.result


@contextmanager
def tiny_model(path: Path) -> Iterator[Path]:
    """A model directory with the tokenizer and the vocabulary of `path`, and one small layer."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((path / "config.json").read_text())
        config |= TINY | {"num_key_value_heads": 1, "head_dim": 8}
        Path(folder, "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (path / name).exists():
                shutil.copy(path / name, folder)
        yield Path(folder)


def measure(engine_of: Callable[[Path], Any], path: Path, num_seqs: int, num_iters: int, results: dict) -> None:
    """Measure the microseconds of each part of a step of `num_seqs` decodes: medians over all steps. Fills "host"."""
    with tiny_model(path) as tiny:
        engine = engine_of(tiny)
        executor = engine.executor = ThroughBytes(engine.executor)
        measured = {name: run(engine, executor, num_seqs, num_iters, *use) for name, use in USES.items()}
    results["host"] = measured
    results["batch_bytes"] = executor.num_bytes
    table = table_of(f"us of the host in a step of {num_seqs} decodes", ["", *measured])
    for row in next(iter(measured.values())):
        table.add_row(row, *(figure(column[row]) for column in measured.values()))
    show_table(table)


def run(engine: Any, executor: ThroughBytes, num_seqs: int, num_iters: int, detokenize: bool, final: bool) -> dict:
    from nanopage import SamplingParams
    from nanopage.params import RequestOutputKind

    rng = random.Random(0)
    kind = RequestOutputKind.FINAL_ONLY if final else RequestOutputKind.CUMULATIVE
    params = SamplingParams(
        temperature=0, max_tokens=NUM_STEPS, ignore_eos=True, detokenize=detokenize, output_kind=kind
    )
    columns: dict[str, list[float]] = {name: [] for name in (*PARTS, "messages as bytes")}
    for iteration in range(-1, num_iters):  # the first warms up
        for i in range(num_seqs):
            token_ids = [rng.randrange(engine.model_config.vocab_size) for _ in range(PROMPT_LEN)]
            engine.add_request(str(i), {"prompt_token_ids": token_ids}, params)
        while engine.has_unfinished_requests():
            executor.seconds = 0.0
            engine.step()
            stats = engine.last_step
            if iteration < 0 or stats.prefill_tokens or stats.decode_tokens < num_seqs:
                continue
            for name, field in PARTS.items():
                columns[name].append(1e6 * getattr(stats, field))
            columns["messages as bytes"].append(1e6 * executor.seconds)
    medians = {name: statistics.median(values) for name, values in columns.items()}
    return medians | {"all": sum(medians.values())}
