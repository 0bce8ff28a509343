"""OpenVINO GenAI: its continuous batching pipeline, which is as fast for one request as its other one.

    python3 -m venv ~/.cache/nanopage/peers/openvino
    ~/.cache/nanopage/peers/openvino/bin/pip install openvino-genai 'optimum-intel[openvino]'

If it stops with "operator torchvision::nms does not exist", torch is a CPU build and torchvision is not:
`~/.cache/nanopage/peers/openvino/bin/pip uninstall torchvision`. Without --quantization, the weights are kept as a
float32 IR, which holds bfloat16 without loss; OpenVINO converts them to the precision it computes in when it loads
them.
"""

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers.protocol import Engine, Options, Output, Work, converted, serve, written_whole


def load(options: Options) -> tuple[dict[str, str], Engine]:
    import numpy as np
    import openvino
    import openvino_genai

    precision = {"bfloat16": "bf16", "float32": "f32"}[options.dtype]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options.kv_gib
    scheduler.max_num_seqs = 256
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": options.threads,
    }
    if options.quantization is None:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # off: int8 weights turn it on by default
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(ir(options)), scheduler, "CPU", properties)

    def run(work: list[Work]) -> list[Output]:
        # Not `generate`: the times in its results are those of the first request's token.
        handles = [
            pipeline.add_request(i, openvino.Tensor(np.array([w.prompt], dtype=np.int64)), greedy(w.output_len))
            for i, w in enumerate(work)
        ]
        tokens: list[list[int]] = [[] for _ in work]
        times: list[list[float]] = [[] for _ in work]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    (output,) = handle.read().values()
                    tokens[i] += output.generated_ids
                    times[i].append(time.perf_counter())
        return [Output(ids, at[0], at[-1]) for ids, at in zip(tokens, times, strict=True)]

    def greedy(num_tokens: int):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        return config

    return {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__}, run


def ir(options: Options) -> Path:
    return converted(options, f"ir-{options.quantization or 'float32'}")


def prepare(options: Options) -> None:
    """Export the model with the environment's optimum-cli."""
    if ir(options).exists():
        return
    with written_whole(ir(options)) as directory:
        command = [str(Path(sys.prefix) / "bin" / "optimum-cli"), "export", "openvino", "--model", str(options.model)]
        command += ["--task", "text-generation-with-past", "--weight-format", options.quantization or "fp32"]
        command.append(str(directory))
        subprocess.run(command, check=True)


if __name__ == "__main__":
    serve(load, prepare)
