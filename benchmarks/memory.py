"""What the memory manager gains: parallel sampling, preemption by swap and by recomputation, slots never filled."""

import random
import statistics
import time
from collections.abc import Callable

import typer

from benchmarks.peers.nanopage import greedy, random_prompt
from benchmarks.report import console, figure, show_table, spread, table_of
from benchmarks.steps import listening
from nanopage.outputs import StepStats

FORK_LENGTHS = 512, 64  # tokens in the prompt and in each completion
NUM_PREEMPTED = 32  # requests that need three times the pool


def measure_forks(engine, rng: random.Random, num_iters: int, results: dict) -> None:
    """Eight completions of one prompt, as one request and as eight. No prefix cache. Fills "parallel sampling"."""
    from nanopage import SamplingParams

    prompt_len, output_len = FORK_LENGTHS
    options = {"temperature": 1.0, "max_tokens": output_len, "ignore_eos": True, "detokenize": False}
    forms = {"1 request, n=8": [8], "8 requests": [1] * 8}
    runs: dict[str, list[dict]] = {name: [] for name in forms}
    results["parallel sampling"] = runs
    for iteration in range(-1, num_iters):  # the first warms up
        prompt = random_prompt(rng, engine, prompt_len)
        for name, counts in forms.items():
            for i, n in enumerate(counts):
                engine.add_request(str(i), prompt, SamplingParams(n=n, seed=i, **options))
            steps, seconds, _ = drive(engine)
            if iteration >= 0:
                blocks = max(step.used_blocks for step in steps)
                runs[name].append(
                    {"blocks": blocks, "prefill_tokens": sum(step.prefill_tokens for step in steps), "seconds": seconds}
                )
    one, eight = runs.values()
    table = table_of(f"8 completions of {output_len} tokens, prompt of {prompt_len}", ["", *forms, "saved"])
    titles = {"blocks at most": "blocks", "prompt tokens computed": "prefill_tokens", "time (s)": "seconds"}
    for title, key in titles.items():
        a, b = (statistics.median_low(run[key] for run in column) for column in (one, eight))
        table.add_row(title, figure(a), figure(b), f"{1 - a / b:.0%}")
    show_table(table)


def measure_preemption(engine_of: Callable, rng: random.Random, num_iters: int, results: dict) -> None:
    """Requests that need three times the pool, preempted by recomputation and by swapping. Fills "preemption"."""
    lengths = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(NUM_PREEMPTED)]
    pool = sum(-(-(i + o) // 16) for i, o in lengths) // 3
    options = {"num_gpu_blocks_override": pool, "max_model_len": 256 + 128, "dtype": "float32"}
    engines = {mode: engine_of(preemption_mode=mode, **options) for mode in ("recompute", "swap")}
    runs: dict[str, list[dict]] = {mode: [] for mode in engines}
    results["preemption"] = runs
    for _ in range(num_iters):
        prompts = [random_prompt(rng, engines["swap"], i) for i, _ in lengths]
        tokens = []
        for mode, engine in engines.items():
            for index, (prompt, (_, output)) in enumerate(zip(prompts, lengths, strict=True)):
                engine.add_request(str(index), prompt, greedy(output))
            steps, seconds, outputs = drive(engine)
            tokens.append({key: output.outputs[0].token_ids for key, output in outputs.items()})
            run = {"seconds": seconds, "preemptions": sum(step.preempted for step in steps)}
            run["tokens computed"] = sum(step.prefill_tokens + step.decode_tokens for step in steps)
            run["blocks swapped out"] = sum(step.swapped_out for step in steps)
            runs[mode].append(run)
        if tokens[0] != tokens[1] or len(tokens[0]) != len(lengths):
            console.print("[red]error:[/red] recomputation and swapping gave different outputs")
            raise typer.Exit(1)
    title = f"{len(lengths)} requests, three times a pool of {pool} blocks, float32: outputs equal"
    table = table_of(title, ["", *runs, "swap / recompute"])
    for key in ("preemptions", "tokens computed", "blocks swapped out", "seconds"):
        columns = [[run[key] for run in column] for column in runs.values()]
        ratio = [b / a if a else None for a, b in zip(*columns, strict=True)]
        table.add_row(key, *(spread(column) for column in columns), spread(ratio))
    show_table(table)


def measure_waste(
    engine, rng: random.Random, num_prompts: int, inputs: tuple[int, int], outputs: tuple[int, int], results: dict
) -> None:
    """The share of allocated slots that are not filled, over all steps of a trace. There is no prefix cache, so no two
    sequences share a block. Fills "waste"."""
    for i in range(num_prompts):
        prompt = random_prompt(rng, engine, rng.randint(*inputs))
        engine.add_request(str(i), prompt, greedy(rng.randint(*outputs)))
    steps, seconds, _ = drive(engine)
    allocated = engine.config.block_size * sum(step.used_blocks for step in steps)
    waste = 1 - sum(step.stored_tokens for step in steps) / allocated
    title = f"{num_prompts} requests, input {inputs[0]}-{inputs[1]}, output {outputs[0]}-{outputs[1]}"
    table = table_of(title, ["allocated slots never filled", "sequences at most", "steps", "time (s)"])
    running = max(step.running for step in steps)
    table.add_row(f"{waste:.2%}", figure(running), figure(len(steps)), figure(seconds))
    show_table(table)
    results["waste"] = {"waste": waste, "sequences": running, "steps": len(steps), "seconds": seconds}


def drive(engine) -> tuple[list[StepStats], float, dict]:
    """Step until all requests are done. Returns (the steps, seconds, request id -> finished output)."""
    steps: list[StepStats] = []
    done: dict = {}
    started = time.perf_counter()
    with listening(engine, steps.append):
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
    return steps, time.perf_counter() - started, done
