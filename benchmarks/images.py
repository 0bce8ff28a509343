"""A model that sees images beside transformers, and what its caches save in the second turn of a conversation.

    python -m benchmarks.images --json results.json

The model has SmolVLM-256M's shape and random weights, so its texts mean nothing. Each image has 640 x 480 pixels, and
becomes 13 squares of 64 tokens. The engines take turns: each prepares the image, encodes it, reads the prompt and
writes the same number of tokens. The second turn of the conversation has the same image, and is measured three times:
with both caches of nanopage; without the prefix cache, so that the whole prompt is computed again, but with the cached
outputs of the encoder; and without either. Times are medians.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.machine import cpu_name, versions
from benchmarks.outputs import check_outputs
from nanopage import LLM, SamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image

CONFIG = Path(__file__).parent / "configs" / "SmolVLM-256M"
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", *PLACES]
QUESTION = "<image> What is this?"
MORE = " And what else is there? Say it in a few words."
Run = Callable[["Image", str, int], tuple[float, float]]
"""Answers a prompt about an image with this many tokens. Returns the seconds to the first, and tokens a second then."""


def make_directory(config: Path, directory: Path) -> None:
    """Copy the files of a model, and add a tokenizer of bytes."""
    shutil.copytree(config, directory, dirs_exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = json.loads((directory / "config.json").read_text()) | {"image_token_id": tokenizer.token_to_id("<image>")}
    (directory / "config.json").write_text(json.dumps(fields))


def run_nanopage(llm: LLM) -> Run:
    def run(image: "Image", text: str, num_tokens: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        prompt = {"prompt": text, "multi_modal_data": {"image": image}}
        return rates(started, [time.perf_counter() for _ in llm.stream(prompt, params)])

    return run


def run_transformers(directory: Path, dtype: str) -> Run:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
    from transformers.models.idefics3 import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    config = AutoConfig.from_pretrained(directory)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype)).eval()
    fields = json.loads((directory / "preprocessor_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), pad_token="<image>")
    side = fields["max_image_size"]["longest_edge"] // config.vision_config.patch_size // config.scale_factor
    processor = Idefics3Processor(Idefics3ImageProcessorPil(**fields), tokenizer, image_seq_len=side**2)

    class Times(list):
        """A streamer: gets the prompt, and then each token."""

        def put(self, value: object) -> None:
            self.append(time.perf_counter())

        def end(self) -> None: ...

    def run(image: "Image", text: str, num_tokens: int) -> tuple[float, float]:
        started, times = time.perf_counter(), Times()
        inputs = processor(text=text, images=[[image]], return_tensors="pt").to("cpu", getattr(torch, dtype))
        length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
        with torch.inference_mode():
            model.generate(**inputs, **length, streamer=times)
        return rates(started, times[1:])

    return run


def rates(started: float, times: list[float]) -> tuple[float, float]:
    """Args: times: of each token."""
    return times[0] - started, (len(times) - 1) / (times[-1] - times[0])


def measure(
    directory: Path, dtype: str, num_iters: int, num_tokens: int, eager: bool = False
) -> dict[str, dict[str, float]]:
    """What both engines need: {name: {"ttft": seconds, "rate": tokens a second}}."""
    from PIL import Image

    llm = LLM(str(directory), load_format="dummy", dtype=dtype, device="cpu", max_num_seqs=1, enforce_eager=eager)
    llm.engine.executor.compile()
    nanopage, transformers = run_nanopage(llm), run_transformers(directory, dtype)
    found: dict[str, list[tuple[float, float]]] = {}
    rng = np.random.default_rng(0)
    for index in range(num_iters + 1):  # the first is a warm-up
        image = Image.fromarray(rng.integers(0, 256, (480, 640, 3), dtype=np.uint8))
        made = {"transformers": transformers(image, QUESTION, num_tokens)}
        made["nanopage"] = nanopage(image, QUESTION, num_tokens)
        made["second turn, both caches"] = nanopage(image, QUESTION + MORE, num_tokens)
        llm.engine.reset_prefix_cache()
        made["second turn, the encoder's cache"] = nanopage(image, QUESTION + MORE, num_tokens)
        llm.engine.reset_prefix_cache()
        llm.engine.executor.worker.wings.items.forget()
        made["second turn, no cache"] = nanopage(image, QUESTION + MORE, num_tokens)
        for name, pair in made.items() if index else ():
            found.setdefault(name, []).append(pair)
    medians = {name: map(statistics.median, zip(*pairs, strict=True)) for name, pairs in found.items()}
    return {name: dict(zip(("ttft", "rate"), pair, strict=True)) for name, pair in medians.items()}


def main(
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    num_iters: Annotated[int, typer.Option(min=1, max=100)] = 3,
    num_tokens: Annotated[int, typer.Option(min=2, max=1000, help="Tokens of each answer.")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure a model that sees images with nanopage and with transformers."""
    check_outputs({"--json": json_file})
    with tempfile.TemporaryDirectory() as directory:
        make_directory(CONFIG, Path(directory))
        found = measure(Path(directory), dtype, num_iters, num_tokens)
    machine = f"{cpu_name()}; {versions('transformers')}"
    typer.echo(f"{machine}; {CONFIG.name} in {dtype}")
    for name, numbers in found.items():
        typer.echo(f"{name:34} first token {numbers['ttft']:6.2f} s, then {numbers['rate']:6.1f} tokens/s")
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "dtype": dtype, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
