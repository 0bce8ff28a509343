"""Speech to text beside faster-whisper and transformers: one sound, many at once, and the words that are wrong.

    python3 -m venv ~/.cache/nanopage/peers/fasterwhisper
    ~/.cache/nanopage/peers/fasterwhisper/bin/pip install faster-whisper soundfile typer
    python -m benchmarks.transcriptions talks/*.wav --model DIRECTORY --json results.json
    python -m benchmarks.transcriptions hour.wav --model DIRECTORY --num-iters 1

All run the same file, a Whisper in CTranslate2's format. Next to a sound, a .txt file may have what is said in it. All
search greedily, with timestamps, and with higher temperatures where a text is poor. nanopage runs all sounds together.
faster-whisper runs them one after the other with all threads, or two at a time with half of them: the faster way
counts. transformers runs them one after the other, in float32 alone. Each engine has a process of its own. Times are
medians.

With transformers, the greedy tokens of the first 30 seconds of each sound are compared, without timestamps and with
them. Each engine makes its own spectrogram. Whisper's blank first tokens are not suppressed then.
"""

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

PEER = Path.home() / ".cache/nanopage/peers/fasterwhisper/bin/python"
MAX_TOKENS = 224  # of a window


def run_nanopage(model: str, dtype: str, files: list[Path], num_iters: int, compares: bool) -> dict:
    """Transcribe the first file alone and then all at once.

    Args: compares: whether `tokens` has the greedy tokens of each file, without timestamps and with them.
    Returns: seconds, texts, tokens, and the memory of the process.
    """
    import asyncio

    from nanopage.aio.async_llm import AsyncLLM
    from nanopage.audio.files import Sound
    from nanopage.audio.rules import read_speech_tokens
    from nanopage.audio.transcription import Options, Transcription
    from nanopage.params import SamplingParams
    from nanopage.vllm.engine_args import EngineArgs

    started = time.perf_counter()
    quantized = {"quantization": "int8", "dtype": "bfloat16"} if dtype == "int8" else {"dtype": dtype}
    llm = AsyncLLM.from_engine_args(EngineArgs(model=model, **quantized))
    loaded, tokens = time.perf_counter() - started, read_speech_tokens(llm.engine)
    llm.engine.executor.compile()

    async def one(file: Path) -> str:
        job = Transcription(llm, tokens, Sound(file), Options("en"))
        async for _ in job.run():
            pass
        return job.text

    async def greedy(file: Path) -> list[list[int]]:
        job = Transcription(llm, tokens, Sound(file), Options("en"))
        samples = job.sound.window(0)
        spoken = [tokens.languages["en"], tokens.tasks["transcribe"]] if tokens.languages else []
        prompt = {"prompt_token_ids": [tokens.start, *spoken, tokens.begin - 1]}
        allowed = sorted({*range(tokens.begin)} - tokens.suppressed)
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, allowed_token_ids=allowed, detokenize=False)
        sound = {"multi_modal_data": {"audio": (samples, 16_000)}}
        outputs = [output async for output in llm.generate(prompt | sound, params, str(file))]
        plain = [token_id for token_id in outputs[-1].outputs[0].token_ids if token_id != tokens.end]
        return [plain, (await job.attempt(samples, 0.0, 0)).tokens]

    async def many(function: Callable, files: list[Path]) -> list:
        return await asyncio.gather(*map(function, files))

    loop = asyncio.new_event_loop()
    alone, together = (lambda some=some: loop.run_until_complete(many(one, some)) for some in (files[:1], files))
    found = measure(alone, together, num_iters) | {"load": loaded}
    if compares:
        found["tokens"] = loop.run_until_complete(many(greedy, files))
    llm.shutdown()
    return found


def run_transformers(model: str, dtype: str, files: list[Path], num_iters: int, compares: bool) -> dict:
    """As `run_nanopage`."""
    import torch
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from nanopage.audio.files import Sound
    from nanopage.weights import hub

    started, directory = time.perf_counter(), hub.resolve(model)
    whisper: Any = WhisperForConditionalGeneration.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    extractor, tokenizer = WhisperFeatureExtractor.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    loaded, config = time.perf_counter() - started, whisper.generation_config
    config.prev_sot_token_id = tokenizer.convert_tokens_to_ids("<|startofprev|>")
    config.begin_suppress_tokens, config.max_initial_timestamp_index = None, 50
    if config.is_multilingual:
        config.language, config.task = "en", "transcribe"
        config.lang_to_id = {"<|en|>": tokenizer.convert_tokens_to_ids("<|en|>")}
        config.task_to_id = {"transcribe": tokenizer.convert_tokens_to_ids("<|transcribe|>")}

    def generate(samples: np.ndarray, **options: Any) -> list[int]:
        inputs = extractor(
            samples, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True, truncation=False,
            padding="longest" if len(samples) > 480_000 else "max_length",
        )  # fmt: skip
        with torch.inference_mode():
            made = whisper.generate(**inputs, **options)[0].tolist()
        begin = config.no_timestamps_token_id + 1
        return [token_id for token_id in made if token_id < config.eos_token_id or token_id >= begin]

    def one(file: Path) -> str:
        sound, pieces = Sound(file), list[np.ndarray]()
        while len(piece := sound.window(sum(map(len, pieces)))):
            pieces.append(piece.copy())
        said = generate(
            np.concatenate(pieces),
            return_timestamps=True,
            condition_on_prev_tokens=True,
            temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
            compression_ratio_threshold=1.35,  # transformers' own, of tokens
            logprob_threshold=-1.0,
            no_speech_threshold=0.6,
        )
        return str(tokenizer.decode([token_id for token_id in said if token_id < config.eos_token_id]))

    def greedy(file: Path) -> list[list[int]]:
        samples, options = Sound(file).window(0), {"max_new_tokens": MAX_TOKENS, "force_unique_generate_call": True}
        return [generate(samples, return_timestamps=times, **options) for times in (False, True)]

    torch.manual_seed(0)
    tokens = [greedy(file) for file in files] if compares else []
    config.begin_suppress_tokens = json.loads((directory / "generation_config.json").read_text()).get(
        "begin_suppress_tokens"
    )
    found = measure(lambda: [one(files[0])], lambda: [one(file) for file in files], num_iters)
    return found | {"load": loaded, "tokens": tokens}


def run_faster_whisper(model: str, dtype: str, files: list[Path], num_iters: int, compares: bool) -> dict:
    """As `run_nanopage`, without tokens."""
    from concurrent.futures import ThreadPoolExecutor

    from faster_whisper import WhisperModel

    started = time.perf_counter()
    whole = WhisperModel(model, device="cpu", compute_type=dtype, cpu_threads=2)
    loaded = time.perf_counter() - started
    halves = WhisperModel(model, device="cpu", compute_type=dtype, cpu_threads=1, num_workers=2)

    def one(model: "WhisperModel", file: Path) -> str:
        return "".join(segment.text for segment in model.transcribe(str(file), beam_size=1, best_of=1)[0])

    def by_halves() -> list[str]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda file: one(halves, file), files))

    first = measure(lambda: [one(whole, files[0])], lambda: [one(whole, file) for file in files], num_iters)
    second = measure(list, by_halves, num_iters)
    return first | {"many": min(first["many"], second["many"]), "load": loaded}


def measure(single, several, num_iters: int) -> dict:
    """The median seconds of both functions, and the texts of the second."""
    times: dict[str, list[float]] = {"one": [], "many": []}
    texts: list[str] = []
    for index in range(num_iters + 1):  # the first is a warm-up
        for name, function in (("one", single), ("many", several)):
            started = time.perf_counter()
            texts = function()
            if index:
                times[name].append(time.perf_counter() - started)
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024  # type: ignore[index]
    return {name: statistics.median(values) for name, values in times.items()} | {"texts": texts, "MiB": peak}


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def word_errors(said: str, heard: str) -> tuple[int, int]:
    """The least number of words to insert, drop or replace (Levenshtein), and the number of words that were said."""
    ours, theirs = words_of(said), words_of(heard)
    row = list(range(len(theirs) + 1))
    for i, word in enumerate(ours, start=1):
        previous, row[0] = row[0], i
        for j, other in enumerate(theirs, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1], len(ours)


def gap_and_repeat(said: str, heard: str) -> tuple[int, int]:
    """The most words that are missing, and the most that are too many, in one place."""
    changes = SequenceMatcher(None, words_of(said), words_of(heard), autojunk=False).get_opcodes()
    extra = [(j2 - j1) - (i2 - i1) for _, i1, i2, j1, j2 in changes]
    return max(0, -min(extra)), max(0, *extra)


def equal_clips(one: list[list[list[int]]], other: list[list[list[int]]]) -> list[int]:
    """On how many clips the tokens are equal, without timestamps and with them."""
    return [sum(a[kind] == b[kind] for a, b in zip(one, other, strict=True)) for kind in (0, 1)]


ENGINES = {"nanopage": run_nanopage, "faster-whisper": run_faster_whisper, "transformers": run_transformers}


def main(
    files: Annotated[list[Path], typer.Argument(exists=True)],
    model: Annotated[Path, typer.Option(exists=True, help="Directory of a Whisper in CTranslate2's format.")],
    dtype: Annotated[list[str], typer.Option(help="float32, bfloat16 or int8.")] = ["float32", "int8"],  # noqa: B006
    engine: Annotated[list[str], typer.Option(help="nanopage, faster-whisper or transformers.")] = [*ENGINES],  # noqa: B006
    num_iters: Annotated[int, typer.Option(min=1)] = 3,
    peer_python: Annotated[Path, typer.Option(help="Python that has faster-whisper.")] = PEER,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure transcriptions by nanopage, faster-whisper and transformers."""
    import soundfile

    seconds = [soundfile.info(file).duration for file in files]
    said = [file.with_suffix(".txt").read_text() for file in files if file.with_suffix(".txt").exists()]
    results = []
    for kind in dtype:
        engines = [name for name in engine if name != "transformers" or kind == "float32"]
        for name in engines:
            python = str(peer_python) if name == "faster-whisper" else sys.executable
            request = json.dumps([name, str(model), kind, list(map(str, files)), num_iters, "transformers" in engines])
            done = subprocess.run([python, "-m", "benchmarks.transcriptions", request], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            results.append({"engine": name, "dtype": kind} | found)
            typer.echo(
                f"{name:15} {kind:9} load {found['load']:5.2f} s; {seconds[0]:.0f} s of sound in {found['one']:.2f} "
                f"s ({seconds[0] / found['one']:.1f} times real time); {len(files)} sounds, {sum(seconds):.0f} s, in "
                f"{found['many']:.2f} s ({sum(seconds) / found['many']:.1f} times); {found['MiB']} MiB"
            )
            if said:
                pairs = list(zip(said, found["texts"], strict=True))
                wrong, total = map(sum, zip(*(word_errors(*pair) for pair in pairs), strict=True))
                gap, repeat = map(max, zip(*(gap_and_repeat(*pair) for pair in pairs), strict=True))
                found = f"{wrong} of {total} words wrong ({wrong / total:.1%})"
                typer.echo(f"{'':15} {found}; in one place, at most {gap} missing and {repeat} too many")
        tokens = {each["engine"]: each["tokens"] for each in results if each["dtype"] == kind and each.get("tokens")}
        if tokens.keys() >= {"nanopage", "transformers"}:
            plain, timed = equal_clips(tokens["nanopage"], tokens["transformers"])
            typer.echo(f"tokens equal to transformers': {plain} of {len(files)} without timestamps, {timed} with them")
    if json_file is not None:
        json_file.write_text(json.dumps({"seconds": seconds, "results": results}, indent=1))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        name, model, kind, paths, *rest = json.loads(sys.argv[1])
        print(json.dumps(ENGINES[name](model, kind, [Path(path) for path in paths], *rest)))
    else:
        typer.run(main)
