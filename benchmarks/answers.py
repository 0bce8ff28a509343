"""Measures how well a model answers with different sampling settings.

    python -m benchmarks.answers --mt-bench FILE --json benchmarks/results/answers.json

There are 50 simple questions (simple_questions.jsonl), each asked with eight seeds, or once at temperature 0. A reply
is right if it matches a pattern, and right at once if its first sentence matches. The first turns of mt_bench's
questions show how many replies are degenerate: they repeat themselves until chat.py's guard (terminal/guard.py) ends
them.
"""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.datasets import read_json_lines
from benchmarks.machine import cpu_name, versions
from benchmarks.outputs import check_outputs
from nanopage import LLM, RequestOutput, SamplingParams
from nanopage.params import RequestOutputKind
from nanopage.terminal.guard import LoopGuard
from nanopage.text.tool_prompt import render_chat

QUESTIONS = Path(__file__).parent / "simple_questions.jsonl"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "makers'": {"temperature": 0.2, "top_p": 0.9},
    "older default": {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
    "default": {},  # the model's default settings
}


def ask(llm: LLM, asked: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    """Answer questions, all in one batch. The finish_reason of a reply that became a loop is "abort"."""
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    outputs: dict[int, RequestOutput] = {}
    guards = [LoopGuard() for _ in asked]
    for number, (question, params) in enumerate(asked):
        prompt = render_chat(tokenizer, [{"role": "user", "content": question}], None)
        ids = engine.input_processor.prompts.encode(prompt, add_special_tokens=False)
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            number = int(output.request_id)
            outputs[number] = output
            if guards[number].feed(output.outputs[0].delta) and not output.finished:
                outputs[number] = engine.abort(output.request_id) or output
    return [outputs[number] for number in range(len(asked))]


def measure(
    llm: LLM, params: SamplingParams, simple: list[dict], long: list[str], seeds: int, max_tokens: int
) -> dict[str, Any]:
    """Count the right answers to `simple` questions, and the degenerate replies to `long` questions.

    Args: max_tokens: the most tokens of a reply to a long question.
    """
    tries = 1 if params.greedy else seeds
    params = replace(params, output_kind=RequestOutputKind.CUMULATIVE)
    asked = [(q["question"], replace(params, seed=seed, max_tokens=64)) for q in simple for seed in range(tries)]
    num_simple = len(asked)
    asked += [(question, replace(params, seed=0, max_tokens=max_tokens)) for question in long]
    replies = [output.outputs[0] for output in ask(llm, asked)]
    patterns = [q["pattern"] for q in simple for _ in range(tries)]
    right = [bool(re.search(p, reply.text, re.IGNORECASE)) for p, reply in zip(patterns, replies, strict=False)]
    at_once = [
        bool(re.search(p, re.split(r"(?<=[.!?])\s|\n", reply.text.strip())[0], re.IGNORECASE))
        for p, reply in zip(patterns, replies, strict=False)
    ]
    endings = Counter(reply.finish_reason for reply in replies[num_simple:])
    return {
        "right": sum(right),
        "right_at_once": sum(at_once),
        "of": num_simple,
        "mt_bench": {"degenerate": endings["abort"], "ended": endings["stop"], "cut": endings["length"]},
        "replies": [[question, reply.text] for (question, _), reply in zip(asked, replies, strict=True)],
    }


def main(
    mt_bench: Annotated[Path, typer.Option(help="mt_bench's question file (JSON lines).")],
    model: Annotated[str | None, typer.Option(help="Directory, .gguf file or hub id [default: SmolLM2-135M].")] = None,
    settings: Annotated[str, typer.Option(help="Names of settings, or JSON: name -> parameters.")] = ",".join(SETTINGS),
    seeds: Annotated[int, typer.Option(min=1, help="Of each simple question.")] = 8,
    every: Annotated[int, typer.Option(min=1, help="Ask only one in so many questions.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=64, help="Of a reply to a question of mt_bench.")] = 1024,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results and replies to this file.")] = None,
) -> None:
    check_outputs({"--json": json_file}, {"--mt-bench": mt_bench})
    simple = [fields for _, fields in read_json_lines(QUESTIONS, "")][::every]
    long = [fields["turns"][0] for _, fields in read_json_lines(mt_bench, "--mt-bench")][::every]
    chosen = (
        json.loads(settings) if settings.startswith("{") else {name: SETTINGS[name] for name in settings.split(",")}
    )
    llm = LLM(model=model, max_model_len=max_tokens + 512, max_num_seqs=96)
    results: dict[str, Any] = {"cpu": cpu_name(), "versions": versions(), "settings": {}}
    for name, fields in chosen.items():
        params = SamplingParams(**fields) if fields else llm.get_default_sampling_params()
        found = measure(llm, params, simple, long, seeds, max_tokens)
        results["settings"][name] = {"parameters": fields or "those of the model", **found}
        degenerate = found["mt_bench"]["degenerate"]
        print(f"{name}: {found['right']} of {found['of']} right, {degenerate} of {len(long)} degenerate", flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
