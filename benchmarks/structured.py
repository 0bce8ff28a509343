"""What structured output costs: which schemas compile, the time of masks, and the time of steps with 0, 1 and all rows
constrained."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema

from nanopage import SamplingParams, StructuredOutputsParams
from nanopage.engine.engine import LLMEngine
from nanopage.grammar.structured import GrammarMask, Grammars
from nanopage.outputs import StepStats

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS = {
    "type": "array",
    "items": {"type": "string", "maxLength": 200},
    "minItems": 1000,
}  # the model never gets to its end


def compile_all(engine: LLMEngine, files: Iterable[Path], results: dict[str, Any]) -> dict[Path, Any]:
    """Compile each schema and fill `results["schemas"]`. Returns the schemas that compiled."""
    tokenizer = engine.input_processor.prompts.require_tokenizer("this benchmark", "a model with a tokenizer")
    grammars = Grammars(tokenizer, engine.model_config.vocab_size, engine.model_config.eos_token_ids)
    grammars.compile(StructuredOutputsParams(json_object=True))  # makes the vocabulary
    seconds, compiled = [], {}
    refused: Counter[str] = Counter()
    for file in files:
        schema, started = json.loads(file.read_text(encoding="utf-8-sig")), time.perf_counter()
        try:
            grammars.compile(StructuredOutputsParams(json=schema)).make_mask([])
        except ValueError as error:
            refused[reason(str(error))] += 1
            continue
        seconds.append(time.perf_counter() - started)
        compiled[file] = schema
    results["schemas"] = {
        "files": len(compiled) + sum(refused.values()),
        "compiled": len(compiled),
        "refused": dict(refused.most_common()),
        "seconds_to_first_mask": quantiles(seconds),
    }
    return compiled


def reason(message: str) -> str:
    """An error message without the parts that are specific to one schema."""
    return message.removeprefix("structured_outputs.json").strip(": ").split(":")[0].split('"')[0][:60].strip()


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in places.items()}


def generate_all(engine: LLMEngine, schemas: dict[Path, Any], max_tokens: int, results: dict[str, Any]) -> None:
    """Have the model write a value of each schema, and fill `results["outputs"]`: which are valid."""
    prompt = {"prompt": "An example of the data, as JSON:\n"}
    for number, schema in enumerate(schemas.values()):
        params = SamplingParams(
            temperature=0.7,
            seed=number,
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        engine.add_request(str(number), prompt, params)
    counts: Counter[str] = Counter()
    listed = list(schemas.items())
    invalid: list[str] = []
    errors: Counter[str] = Counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            completion, (file, schema) = output.outputs[0], listed[int(output.request_id)]
            if completion.finish_reason != "stop":
                counts["cut at max_tokens" if completion.finish_reason == "length" else "ended by an error"] += 1
                if output.error:
                    errors[reason(output.error)] += 1
                continue
            try:
                jsonschema.validate(json.loads(completion.text), schema)
                counts["complete and valid"] += 1
            except jsonschema.ValidationError as error:
                counts["complete but not valid"] += 1
                invalid.append(f"{file.name}: {error.validator} at {error.json_path}: {error.message[:100]}")
            except Exception as error:  # the schema refers to another file, or jsonschema does not read its expressions
                counts["complete; the validator failed"] += 1
                invalid.append(f"{file.name}: {type(error).__name__}: {str(error)[:100]}")
    results["outputs"] = {"max_tokens": max_tokens, **counts, "not valid": invalid, "errors": dict(errors)}


def time_masks(engine: LLMEngine, schema: dict, text: str) -> float:
    """The median seconds for a mask, over a text that follows a schema."""
    tokenizer = engine.input_processor.prompts.require_tokenizer("this benchmark", "a model with a tokenizer")
    grammar = engine.input_processor.compile_grammar(StructuredOutputsParams(json=schema))
    seconds, token_ids = [], tokenizer.encode(text, add_special_tokens=False)
    for _ in range(5):
        mask: Any = grammar.make_mask([])
        assert isinstance(mask, GrammarMask)
        for number in range(1, len(token_ids) + 1):
            started = time.perf_counter()
            mask.allowed(token_ids[:number])
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def time_steps(
    engine: LLMEngine, num_requests: int, counts: list[int], num_steps: int, results: dict[str, Any]
) -> None:
    """Fill `results["steps"]`: seconds of a decode step with a number of requests, some of them constrained."""
    stepped: list[StepStats] = []
    engine.listeners.append(stepped.append)
    rows = results["steps"] = []
    rounds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(3):  # in turn, so that all run under the same conditions
        for count in counts:
            for number in range(num_requests):
                form = StructuredOutputsParams(json=ENDLESS) if number < count else None
                params = SamplingParams(
                    temperature=0,
                    max_tokens=num_steps,
                    ignore_eos=form is None,
                    structured_outputs=form,
                    detokenize=False,
                )
                engine.add_request(str(number), {"prompt_token_ids": [number + 1] * 8}, params)
            stepped.clear()
            while engine.has_unfinished_requests():
                engine.step()
            full = [s.seconds for s in stepped if not s.prefill_tokens and s.decode_tokens == num_requests]
            rounds[count].append(statistics.median(full))
    engine.listeners.remove(stepped.append)
    for count in counts:
        rows.append({"requests": num_requests, "constrained": count, "seconds": statistics.median(rounds[count])})
