"""transformers' continuous batching: the manager behind `generate_batch`, which takes a length for each request, too.
nanopage depends on transformers, so that it is installed already; it runs in bench.py's own environment.
"""

from benchmarks.peers.protocol import Engine, Options, Output, Work, serve


def load(options: Options) -> tuple[dict[str, str], Engine]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    hf = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    page_size = ContinuousBatchingConfig().page_size
    manager = hf.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
        # Twice the pages: every request may leave one half empty.
        ContinuousBatchingConfig(num_blocks=2 * options.kv_tokens // page_size, max_batch_tokens=2048),
    )
    manager.start()  # its thread sleeps while there is nothing to do

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

    return {"transformers": transformers.__version__, "torch": torch.__version__}, run


if __name__ == "__main__":
    serve(load)
