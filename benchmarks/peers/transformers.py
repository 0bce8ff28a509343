"""transformers `generate`: one left-padded batch that runs to its longest output. nanopage depends on it, so it is
installed already; it runs in bench.py's own environment. On a GPU its cache is the static one, whose decode steps
`generate` compiles by itself.
"""

import time
from pathlib import Path

from benchmarks.peers.protocol import Engine, Options, Output, Work, serve


def load(options: Options) -> tuple[dict[str, str], Engine]:
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    engine = runner(options.model, getattr(torch, options.dtype), torch.device(options.device))
    return {"transformers": transformers.__version__, "torch": torch.__version__}, engine


def runner(model: Path, dtype, device, load_format: str = "auto") -> Engine:
    """`generate` as an Engine. The batch runs to its longest output; a request gets the tokens asked for. `load_format`
    as in nanopage's EngineConfig."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    hf = load_model(model, dtype, device, load_format)

    class Clock(BaseStreamer):  # generate() puts the prompt first, then every new token
        def __init__(self):
            self.times: list[float] = []

        def put(self, value):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    on_gpu = torch.device(device).type == "cuda"
    options = {"cache_implementation": "static"} if on_gpu else {}

    @torch.inference_mode(not on_gpu)  # generate() turns gradients off itself, and compiles for ordinary tensors
    def run(work: list[Work]) -> list[Output]:
        width, longest = max(len(w.prompt) for w in work), max(w.output_len for w in work)
        ids = torch.zeros(len(work), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, w in enumerate(work):
            ids[row, width - len(w.prompt) :] = torch.tensor(w.prompt)
            mask[row, width - len(w.prompt) :] = 1
        clock = Clock() if len(work) == 1 else None  # it takes no batches
        out = hf.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            do_sample=False,
            repetition_penalty=1.0,  # the checkpoint may recommend another
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
            streamer=clock,
            **options,
        )
        rows = out[:, width:].tolist()
        if clock:
            return [Output(rows[0], clock.times[1], clock.times[-1])]
        return [Output(row[: w.output_len]) for row, w in zip(rows, work, strict=True)]

    return run


def load_model(path: Path, dtype, device, load_format: str):
    """transformers' model of a directory, with its weights or nanopage's dummy ones."""
    from transformers import AutoModelForCausalLM

    if load_format == "dummy":
        return dummy_model(path, dtype, device).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def dummy_model(path: Path, dtype, device):
    """The model of a config.json, with exactly the tensors that nanopage's load_format="dummy" draws."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from nanopage.weights import loader

    with torch.device(device):
        hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    parameters = dict(hf.named_parameters())
    with torch.no_grad():
        for name, tensor in loader.dummy_tensors(loader.read_config(path), dtype, device):
            parameters.pop(name).copy_(tensor)
    if parameters:
        raise RuntimeError(f"transformers has parameters that nanopage has not: {', '.join(parameters)}")
    return hf


if __name__ == "__main__":
    serve(load)
