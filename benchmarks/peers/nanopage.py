"""nanopage itself, by the same protocol as the others. It runs in bench.py's own environment."""

import random
import subprocess
from pathlib import Path

from benchmarks.peers.protocol import Engine, Options, Output, Work, serve


def load(options: Options) -> tuple[dict[str, str], Engine]:
    return versions(), runner(make(options))


def prepare(options: Options) -> None:
    """Compile, if that is wanted and has not been done on this machine."""
    if options.compiled and not options.eager:
        make(options)


def make(options: Options):
    """The LLM. Without `options.compiled`, it compiles by itself, in the background once it has answered."""
    import torch

    from nanopage import LLM

    torch.set_num_threads(options.threads)
    llm = LLM(
        str(options.model),
        dtype=options.dtype,
        device=options.device,
        enforce_eager=options.eager,
        batch_invariant=options.batch_invariant,
        quantization=options.quantization,
        kv_cache_gib=options.kv_gib,
        max_model_len=options.max_model_len,
    )
    if options.compiled:
        llm.engine.executor.compile()
    return llm


def runner(llm) -> Engine:
    """`llm.generate` as an Engine."""

    def run(work: list[Work]) -> list[Output]:
        params = [greedy(w.output_len) for w in work]
        outputs = llm.generate([w.prompt for w in work], params, use_tqdm=False)
        times = [output.metrics.token_times for output in outputs]
        return [Output(o.outputs[0].token_ids, t[0], t[-1]) for o, t in zip(outputs, times, strict=True)]

    return run


def greedy(num_tokens: int):
    """SamplingParams of exactly so many tokens, without text."""
    from nanopage import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def random_prompt(rng: random.Random, engine, num_tokens: int) -> list[int]:
    return [rng.randrange(engine.model_config.vocab_size) for _ in range(num_tokens)]


def versions() -> dict[str, str]:
    import torch

    import nanopage

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "no commit"
    return {"nanopage": f"{nanopage.__version__} ({commit})", "torch": torch.__version__}


if __name__ == "__main__":
    serve(load, prepare)
