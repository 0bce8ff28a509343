"""Kills `nanopage run-batch` at random points and resumes it, and compares it with LLM.generate.

    python -m benchmarks.run_batch --json run_batch.json

Half the lines are completions, half are chats, all greedy. One run is killed with SIGKILL several times, and started
again each time. No line may be lost or written twice, and the answers are compared with those of `LLM.generate` for the
same prompts. In float64 they must be equal; in smaller types, a near-tie may fall either way in another batch. Then
runs that nobody kills take turns with `LLM.generate`. Both are timed without the time to load the model.
"""

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.machine import cpu_name, versions
from benchmarks.outputs import check_outputs
from benchmarks.report import console
from nanopage import LLM
from nanopage.weights.hub import name_of

WORDS = ("river", "lamp", "harbour", "violin", "orchard", "granite", "letter", "winter", "engine", "market")


def requests_of(rng: random.Random, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """The lines of the input."""
    lines: list[dict[str, Any]] = []
    body: dict[str, Any]
    for number in range(count):
        text = f"{number}. Write about a {rng.choice(WORDS)}, a {rng.choice(WORDS)} and {rng.randint(2, 999)} days."
        url, body = "/v1/completions", {"prompt": text}
        if number % 2:
            url, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
        body |= {"temperature": 0, "max_tokens": max_tokens}
        lines.append({"custom_id": str(number), "method": "POST", "url": url, "body": body})
    return lines


def prompt_of(llm: LLM, body: dict[str, Any]) -> Any:
    """The prompt of a line for `LLM.generate`."""
    if "prompt" in body:
        return body["prompt"]
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(body["messages"])
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def start(options: list[str], source: Path, target: Path, log: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "nanopage", "run-batch", "-i", str(source), "-o", str(target), *options]
    return subprocess.Popen(command, stderr=log)


def run(options: list[str], source: Path, target: Path) -> str:
    """Run to the end. Returns the log."""
    with tempfile.TemporaryFile() as log:
        code = start(options, source, target, log).wait()
        log.seek(0)
        text = log.read().decode()
    if code:
        raise SystemExit(f"run-batch ended with exit code {code}: {text[-2000:]}")
    return text


def run_killed(options: list[str], source: Path, target: Path, points: list[int], rng: random.Random) -> list[int]:
    """Run to the end, with a kill at each of these numbers of lines. Returns: the number of lines at each kill."""
    killed = []
    for point in points:
        process = start(options, source, target, subprocess.DEVNULL)
        while process.poll() is None and lines_in(target) < point:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        if process.poll() is None:
            process.kill()
            killed.append(lines_in(target))
        process.wait()
    run(options, source, target)
    return killed


def lines_in(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def run_timed(options: list[str], source: Path, target: Path) -> float:
    """Seconds of a whole run, as its last line says."""
    text = run(options, source, target)
    match = re.search(r"; ([\d,.]+) s, [\d,]+ prompt tokens", text)
    if match is None:
        raise SystemExit(f"run-batch has not said how long it took: {text[-2000:]}")
    return float(match[1].replace(",", ""))


def check(target: Path, lines: list[dict[str, Any]], expected: list[str]) -> dict[str, Any]:
    """What is wrong with an output, and its number of tokens."""
    outputs = [json.loads(text) for text in target.read_text().splitlines()]
    seen = Counter(output["custom_id"] for output in outputs)
    found: dict[str, Any] = {
        "lost": sum(line["custom_id"] not in seen for line in lines),
        "twice": sum(count > 1 for count in seen.values()),
        "errors": 0,
        "other_texts": [],
        "output_tokens": 0,
    }
    for output in outputs:
        number, response = int(output["custom_id"]), output["response"]
        if output["id"] != f"batch_req_{number + 1}" or response is None or response["status_code"] != 200:
            found["errors"] += 1
            continue
        body = response["body"]
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        found["output_tokens"] += body["usage"]["completion_tokens"]
        if text != expected[number]:
            found["other_texts"].append(number)
    return found


def main(
    model: Annotated[str | None, typer.Option(help="Directory or hub id [default: SmolLM2-135M-Instruct].")] = None,
    num_lines: Annotated[int, typer.Option(min=2)] = 2000,
    max_tokens: Annotated[int, typer.Option(min=1)] = 16,
    kills: Annotated[int, typer.Option(min=0)] = 3,
    num_iters: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 3,
    dtype: Annotated[str, typer.Option(help="As of LLM.")] = "float32",
    eager: Annotated[bool, typer.Option(help="Compile nothing.")] = False,
    seed: Annotated[int, typer.Option(help="Of the prompts and the kills.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    check_outputs({"--json": json_file})
    rng = random.Random(seed)
    lines = requests_of(rng, num_lines, max_tokens)
    early = range(1, 1 + num_lines * 9 // 10)  # before the last lines, which are written soon after
    points = sorted(rng.sample(early, min(kills, len(early))))
    options = ["--dtype", dtype, "--max-model-len", "512", *(["--enforce-eager"] if eager else [])]
    llm = LLM(model, dtype=dtype, max_model_len=512, enforce_eager=eager)
    if not eager:
        with console.status("compiling"):
            llm.engine.executor.compile()
    prompts = [prompt_of(llm, line["body"]) for line in lines]
    params = replace(llm.get_default_sampling_params(), temperature=0, max_tokens=max_tokens)
    options = [*([] if model is None else ["--model", model]), *options]
    seconds: dict[str, list[float]] = {"run-batch": [], "generate": []}
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "in.jsonl"), Path(directory, "out.jsonl")
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for number in range(num_iters):
            llm.reset_prefix_cache()
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds["generate"].append(time.perf_counter() - started)
            seconds["run-batch"].append(run_timed(options, source, Path(directory, f"{number}.jsonl")))
        expected = [output.outputs[0].text for output in outputs]
        plain = check(Path(directory, "0.jsonl"), lines, expected)
        killed = run_killed(options, source, target, points, rng)
        found = check(target, lines, expected)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    results = {
        "cpu": cpu_name(),
        "versions": versions(),
        "model": name_of(model),
        "dtype": dtype,
        "lines": num_lines,
        "max_tokens": max_tokens,
        "lines_at_kills": killed,
        "killed": found,
        "not_killed": plain,
        "seconds": seconds,
        "output_tokens_per_second": {name: plain["output_tokens"] / median for name, median in medians.items()},
        "throughput_of_run_batch_over_generate": medians["generate"] / medians["run-batch"],
    }
    console.print_json(data=results)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    wrong = any(each[name] for each in (found, plain) for name in ("lost", "twice", "errors"))
    if wrong or (dtype == "float64" and (found["other_texts"] or plain["other_texts"])):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
