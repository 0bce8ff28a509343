"""CTranslate2's Generator, in float32 or int8; on a CPU it does not compute in bfloat16.

    python3 -m venv ~/.cache/nanopage/peers/ctranslate2
    ~/.cache/nanopage/peers/ctranslate2/bin/pip install ctranslate2 transformers torch

Its batches are static. Prompts of different lengths are computed at once up to the length of the shortest, the rest
token by token, in the steps in which other requests already generate. So prompts of similar lengths are batched. A
request leaves its batch after its last token. A prefix common to all prompts is CTranslate2's static prompt, computed
once. With int8, weights and activations of matrix products are int8, everything else is float32.
"""

import json
import time
from pathlib import Path

from benchmarks.peers.protocol import (
    Engine,
    Options,
    Output,
    Work,
    common_prefix,
    converted,
    serve,
    similar_prompts,
    written_whole,
)


def load(options: Options) -> tuple[dict[str, str], Engine]:
    import ctranslate2

    # A second thread makes an int8 batch slower on AMD's CPUs, so batches run side by side, with one thread each.
    batches_at_once = options.threads if options.quantization else 1
    generator = ctranslate2.Generator(
        str(model(options)),
        compute_type=compute_type(options),
        inter_threads=batches_at_once,
        intra_threads=options.threads // batches_at_once,
    )
    vocabulary = json.loads((model(options) / "vocabulary.json").read_text())

    def run(work: list[Work]) -> list[Output]:
        outputs = [Output([]) for _ in work]
        shared = common_prefix([w.prompt for w in work]) if len(work) > 1 else 0
        pending = []
        for batch in similar_prompts(work):
            pending += start([work[i] for i in batch], [outputs[i] for i in batch], shared)
        for result in pending:
            result.result()
        return outputs

    def start(batch: list[Work], outputs: list[Output], shared: int) -> list:
        """Generate in threads of CTranslate2's; `outputs` are complete when all results that this returns are."""

        def add(step) -> bool:
            """Add a token to its output. Returns whether it is the last of its request."""
            output, now = outputs[step.batch_id], time.perf_counter()
            output.token_ids.append(step.token_id)
            output.first, output.last = output.first or now, now
            return len(output.token_ids) == batch[step.batch_id].output_len

        texts = [[vocabulary[i] for i in w.prompt] for w in batch]  # it takes tokens as strings, and finds their ids
        return generator.generate_batch(
            [text[shared:] for text in texts],
            static_prompt=texts[0][:shared] or None,
            include_prompt_in_result=False,
            max_length=max(len(w.prompt) + w.output_len for w in batch),  # steps that read prompts count, too
            end_token=[],  # none
            callback=add,
            asynchronous=True,
        )

    return {"ctranslate2": ctranslate2.__version__}, run


def compute_type(options: Options) -> str:
    if options.dtype == "bfloat16" and not options.quantization:
        raise RuntimeError("CTranslate2 does not compute in bfloat16 on a CPU: only --dtype float32 or int8")
    return options.quantization or options.dtype


def model(options: Options) -> Path:
    return converted(options, f"ctranslate2-{compute_type(options)}")


def prepare(options: Options) -> None:
    """Convert the model's weights to CTranslate2's format."""
    if model(options).exists():
        return
    from ctranslate2.converters import TransformersConverter

    with written_whole(model(options)) as directory:
        converter = TransformersConverter(str(options.model), low_cpu_mem_usage=True)
        converter.convert(str(directory), quantization=compute_type(options))


if __name__ == "__main__":
    serve(load, prepare)
