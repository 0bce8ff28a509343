"""What drafts gain: the decode speed on four tasks with drafts, relative to the speed without, and the accepted share.

The texts are nanopage's own documents and sources. The engines take turns, step by step, so that both run under the
same conditions. Peers decode the same token ids greedily, in two processes each, which take turns batch by batch.
"""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compare import SETTLE, Setup, listed, peer_arguments
from benchmarks.peer import Peer, PeerError, prepare
from benchmarks.peers.protocol import Work
from nanopage import SamplingParams
from nanopage.engine.engine import LLMEngine
from nanopage.outputs import StepStats

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("docs/tour.md", "docs/lora.md", "docs/async.md", "docs/chat.md", "docs/glossary.md", "docs/gpu.md")
SOURCES = ("engine/token_budget.py", "adapters/slots.py", "engine/admission.py", "text/stop_strings.py")
QUESTIONS = (
    "Tell me about your favorite season.",
    "What should I cook for six friends?",
    "How do I learn to play the piano?",
    "Write a short story about a lighthouse.",
    "Why is the sky blue?",
    "Give me advice for a job interview.",
    "What is the difference between a crocodile and an alligator?",
    "Plan a weekend in a city by the sea.",
)
CHARACTERS = 1500  # in a passage: some 400 tokens
PEERS = ("vllm", "llamacpp")  # engines that find drafts in the context


def prompts_of(task: str, count: int, rng: random.Random) -> list[str]:
    """Args: task: one of TASKS."""
    if task == "free chat":
        return [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
    files, folder = (SOURCES, "nanopage") if task == "editing code" else (DOCUMENTS, "")
    prompts = []
    for i in range(count):
        text = (ROOT / folder / files[i % len(files)]).read_text()
        begin = rng.randrange(max(1, len(text) - CHARACTERS))
        passage = text[begin : begin + CHARACTERS].split("\n", 1)[-1].rsplit("\n", 1)[0]
        prompts.append(TASKS[task].format(passage=passage))
    return prompts


TASKS = {
    "summarizing": "Summarize this text, quoting its most important sentences:\n\n{passage}",
    "editing code": "Repeat this code with all comments removed:\n\n```python\n{passage}\n```",
    "question answering": "{passage}\n\nWhat does this text say, and which sentences say so? Quote them.",
    "free chat": "",
}


class Decodes:
    """Counts the decode steps of an engine, which have no tokens of prompts."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        engine.listeners.append(self._count)
        self.reset()

    def reset(self) -> None:
        self.tokens = self.drafted = self.accepted = 0
        self.seconds = 0.0

    def _count(self, stats: StepStats) -> None:
        if stats.prefill_tokens:
            return
        self.tokens += stats.output_tokens
        self.seconds += stats.seconds
        self.drafted += stats.draft_tokens
        self.accepted += sum(stats.accepted_tokens)


def run(decodes: list[Decodes], prompts: list[str], params: SamplingParams) -> list[list[list[int]]]:
    """The output tokens of each prompt, on each engine. Resets the counts of `decodes`."""
    engines = [counted.engine for counted in decodes]
    outputs: list[dict[str, list[int]]] = [{} for _ in engines]
    for counted in decodes:
        counted.reset()
        for i, ids in enumerate(token_ids(counted.engine, prompts)):
            counted.engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    while running := [engine for engine in engines if engine.has_unfinished_requests()]:
        for engine in running:
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                outputs[engines.index(engine)][output.request_id] = output.outputs[0].token_ids
    return [[of_engine[str(i)] for i in range(len(prompts))] for of_engine in outputs]


def token_ids(engine: LLMEngine, prompts: list[str]) -> list[list[int]]:
    """The token ids of the prompts, through the chat template if there is one."""
    reader = engine.input_processor.prompts
    tokenizer = reader.require_tokenizer("this benchmark", "a model with a tokenizer")
    texts = prompts
    if tokenizer.chat_template:
        texts = [tokenizer.render_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    return [reader.encode(text, add_special_tokens=not tokenizer.chat_template) for text in texts]


def measure(
    make_engine: Callable[..., LLMEngine],
    speculation: dict[str, Any],
    batch_sizes: list[int],
    output_len: int,
    num_iters: int,
    seed: int,
    results: dict[str, Any],
) -> None:
    """Fill `results["tasks"]`: a row for each task, batch size and temperature."""
    rows = results["tasks"] = []
    engines = [make_engine(), make_engine(speculative_config=speculation)]
    decodes = [Decodes(engine) for engine in engines]
    for batch_size in batch_sizes:
        for temperature in (0.0, 0.8):
            for task in TASKS:
                prompts = prompts_of(task, batch_size, random.Random(seed))
                params = SamplingParams(temperature=temperature, seed=seed, max_tokens=output_len, ignore_eos=True)
                speeds: list[list[float]] = [[], []]
                same, drafted, accepted = True, 0, 0
                for number in range(num_iters + 1):
                    outputs = run(decodes, prompts, params)
                    same = same and outputs[0] == outputs[1]
                    if number == 0:
                        continue  # a warm-up with these prompts
                    for speed, counted in zip(speeds, decodes, strict=True):
                        speed.append(counted.tokens / counted.seconds)
                    drafted, accepted = drafted + decodes[1].drafted, accepted + decodes[1].accepted
                rows.append(
                    {
                        "task": task,
                        "batch_size": batch_size,
                        "temperature": temperature,
                        **ratio_of(*speeds),
                        "drafted": drafted,
                        "accepted": accepted,
                        "same_output": same,
                    }
                )
    for engine in engines:
        engine.shutdown()


def work_of(engine: LLMEngine, batch_sizes: list[int], output_len: int, seed: int) -> dict[tuple[int, str], list[Work]]:
    """(batch size, task) -> the requests that `measure` makes."""
    return {
        (size, task): [Work(ids, output_len) for ids in token_ids(engine, prompts_of(task, size, random.Random(seed)))]
        for size in batch_sizes
        for task in TASKS
    }


def compare(
    setup: Setup,
    dtype: str,
    draft_tokens: int,
    work: dict[tuple[int, str], list[Work]],
    num_iters: int,
    results: dict[str, Any],
) -> None:
    """Fill `results["peers"]` with greedy rows for each peer of `setup`, or `results["failures"]` with the reason."""
    results["peers"], results["failures"] = {}, {}
    arguments = peer_arguments(dtype, {"drafts": list(work.values())}, setup)
    for name, python in setup.pythons.items():
        command = [python, "-m", f"benchmarks.peers.{name}", *arguments]
        try:
            prepare([*command, "--prepare"], setup.threads)
            measure_peer(name, command, setup.threads, draft_tokens, work, num_iters, results)
        except PeerError as error:
            results["failures"][name] = str(error)


def measure_peer(
    name: str,
    command: list[str],
    threads: int,
    draft_tokens: int,
    work: dict[tuple[int, str], list[Work]],
    num_iters: int,
    results: dict[str, Any],
) -> None:
    """Add `results["peers"][name]`: a row for each batch of `work`. Raises PeerError."""
    rows = results["peers"][name] = []
    peers: list[Peer] = []
    try:
        for more in ([], ["--draft-tokens", str(draft_tokens)]):
            peers.append(Peer([*command, *more], threads))
            results["header"][name] = listed(peers[-1].answer()["versions"])
        for (batch_size, task), batch in work.items():
            speeds: list[list[float]] = [[], []]
            for number in range(num_iters + 1):
                for speed, peer in zip(speeds, peers, strict=True):
                    time.sleep(SETTLE)
                    done = peer.ask(batch)
                    if number > 0 and done.decode_seconds:  # not the warm-up with these prompts
                        speed.append((done.output_tokens - batch_size) / done.decode_seconds)
            rows.append({"task": task, "batch_size": batch_size, **ratio_of(*speeds)})
        for peer in peers:
            peer.close()
    finally:
        for peer in peers:  # at once if something failed
            peer.kill()


def ratio_of(without: list[float], with_drafts: list[float]) -> dict[str, Any]:
    """Medians of speeds, in tokens per second, and of their ratios, round by round."""
    ratios = [b / a for a, b in zip(without, with_drafts, strict=True)]
    return {
        "tokens_per_second": statistics.median(without),
        "with_drafts": statistics.median(with_drafts),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
