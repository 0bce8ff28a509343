"""ONNX Runtime GenAI's Generator, in float32 or int8; its models for a CPU are not in bfloat16.

    python3 -m venv ~/.cache/nanopage/peers/onnxruntime
    ~/.cache/nanopage/peers/onnxruntime/bin/pip install onnxruntime-genai onnx onnx_ir transformers torch

Its Engine, which batches continuously, does so only on a GPU; on a CPU it takes at most 4 requests at a time. So its
Generator runs, whose batches are static: prompts of similar lengths, padded on the right. A batch runs to its longest
output, and a request gets the tokens asked for. Requests do not share a prefix. With int8, weights and activations of
matrix products are int8, everything else is float32.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers.protocol import Engine, Options, Output, Work, converted, serve, similar_prompts, written_whole


def load(options: Options) -> tuple[dict[str, str], Engine]:
    import numpy as np
    import onnxruntime
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(onnx(options)))
    session = {"session_options": {"intra_op_num_threads": options.threads}}
    config.overlay(json.dumps({"model": {"decoder": session}}))
    model = onnxruntime_genai.Model(config)
    # A prompt that ends with this token loses it: one random prompt in 49,152 for the default model.
    padding = json.loads((onnx(options) / "genai_config.json").read_text())["model"]["pad_token_id"]

    def run(work: list[Work]) -> list[Output]:
        outputs = [Output([]) for _ in work]
        for batch in similar_prompts(work):
            generate([work[i] for i in batch], [outputs[i] for i in batch])
        return outputs

    def generate(batch: list[Work], outputs: list[Output]) -> None:
        """Run a batch to its longest output; a token that a request did not ask for is dropped."""
        width, longest = max(len(w.prompt) for w in batch), max(w.output_len for w in batch)
        ids = np.full((len(batch), width), padding, dtype=np.int32)
        for row, w in zip(ids, batch, strict=True):
            row[: len(w.prompt)] = w.prompt
        params = onnxruntime_genai.GeneratorParams(model)
        total = width + longest
        params.set_search_options(do_sample=False, batch_size=len(batch), min_length=total, max_length=total)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(ids if len(batch) > 1 else ids[0])
        for _ in range(longest):
            generator.generate_next_token()
            now = time.perf_counter()
            for token, w, output in zip(generator.get_next_tokens().tolist(), batch, outputs, strict=True):
                if len(output.token_ids) < w.output_len:
                    output.token_ids.append(token)
                    output.first, output.last = output.first or now, now

    versions = {"onnxruntime-genai": onnxruntime_genai.__version__, "onnxruntime": onnxruntime.__version__}
    return versions, run


def precision(options: Options) -> str:
    if options.dtype == "bfloat16" and not options.quantization:
        raise RuntimeError("ONNX Runtime GenAI has no models in bfloat16 for a CPU: only --dtype float32 or int8")
    return options.quantization or "fp32"


def onnx(options: Options) -> Path:
    return converted(options, f"onnx-{precision(options)}")


def prepare(options: Options) -> None:
    """Make the model with ONNX Runtime GenAI's builder. Its prune_lm_head would compute fewer logits of a prompt, but
    takes the last position of a padded batch, which is padding for all but the longest prompt."""
    if onnx(options).exists():
        return
    with written_whole(onnx(options)) as directory:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(options.model)]
        command += ["-o", str(directory), "-p", precision(options), "-e", "cpu", "-c", str(directory / "cache")]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    serve(load, prepare)
