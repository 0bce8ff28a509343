"""transformers' continuous batching: the manager behind `generate_batch`, which takes a length for each request, too.
nanopage depends on transformers, so it is installed already; it runs in bench.py's own environment.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.protocol import Engine, Options, Output, Work, serve
from benchmarks.peers.transformers import load_model

PAGE_SIZE = 256  # tokens: transformers' default. The option's name depends on the version


def load(options: Options) -> tuple[dict[str, str], Engine]:
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    engine, _ = runner(options.model, dtype, torch.device(options.device), "auto", options.kv_tokens)
    return {"transformers": transformers.__version__, "torch": torch.__version__}, engine


def runner(model: Path, dtype, device, load_format: str, kv_tokens: int) -> tuple[Engine, Callable[[], None]]:
    """The manager as an Engine, and a function that ends its thread, which keeps the process alive.

    Args:
        load_format: as in nanopage's EngineConfig.
        kv_tokens: of all requests that run at once, at least PAGE_SIZE for each, because pages are not shared.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    hf = load_model(model, dtype, device, load_format)
    manager = hf.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
        # Twice the pages: every request may leave one half empty.
        ContinuousBatchingConfig(num_blocks=2 * kv_tokens // PAGE_SIZE, max_batch_tokens=2048),
    )
    manager.start()  # its thread sleeps while there is nothing to do

    def stop() -> None:
        manager.stop(timeout=10, hard_stop=True)

    def run(work: list[Work]) -> list[Output]:
        ids = [manager.add_request(w.prompt, max_new_tokens=w.output_len, record_timestamps=True) for w in work]
        done: dict = {}
        while len(done) < len(work):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("continuous batching stopped: its log says why")
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                done[result.request_id] = result
        results = [done[request_id] for request_id in ids]
        return [Output(r.generated_tokens, r.timestamps[0], r.timestamps[-1]) for r in results]

    return run, stop


if __name__ == "__main__":
    serve(load)
