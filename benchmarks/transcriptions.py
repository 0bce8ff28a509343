"""Speech to text beside faster-whisper: one sound, many at once, and the words that are wrong.

    python3 -m venv ~/.cache/nanopage/peers/fasterwhisper
    ~/.cache/nanopage/peers/fasterwhisper/bin/pip install faster-whisper soundfile typer
    python -m benchmarks.transcriptions talks/*.wav --json results.json

Both run Whisper tiny.en, from the same file. Next to a sound, a .txt file may have what is said in it. Both search
greedily, with timestamps, and with higher temperatures where a text is poor. faster-whisper runs sounds one after the
other with all threads, or two at a time with half of them: the faster way counts. Each engine has a process of its own.
Times are medians.
"""

import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

PEER = Path.home() / ".cache/nanopage/peers/fasterwhisper/bin/python"


def run_nanopage(model: str, dtype: str, files: list[Path], num_iters: int) -> dict:
    """Transcribe the first file alone and then all at once. Returns seconds, texts, and the memory of the process."""
    import asyncio

    from nanopage.aio.async_llm import AsyncLLM
    from nanopage.audio.files import Sound
    from nanopage.audio.rules import read_speech_tokens
    from nanopage.audio.transcription import Options, Transcription
    from nanopage.vllm.engine_args import EngineArgs

    started = time.perf_counter()
    quantized = {"quantization": "int8", "dtype": "bfloat16"} if dtype == "int8" else {"dtype": dtype}
    llm = AsyncLLM.from_engine_args(EngineArgs(model="whisper-tiny.en", **quantized))
    loaded, tokens = time.perf_counter() - started, read_speech_tokens(llm.engine)
    llm.engine.executor.compile()

    async def one(file: Path) -> str:
        job = Transcription(llm, tokens, Sound(file), Options())
        async for _ in job.run():
            pass
        return job.text

    async def many(files: list[Path]) -> list[str]:
        return await asyncio.gather(*map(one, files))

    loop = asyncio.new_event_loop()
    alone, together = (lambda some=some: loop.run_until_complete(many(some)) for some in (files[:1], files))
    found = measure(alone, together, num_iters) | {"load": loaded}
    llm.shutdown()
    return found


def run_faster_whisper(model: str, dtype: str, files: list[Path], num_iters: int) -> dict:
    """As `run_nanopage`."""
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


def word_errors(said: str, heard: str) -> tuple[int, int]:
    """The least number of words to insert, drop or replace (Levenshtein), and the number of words that were said."""
    ours, theirs = (re.findall(r"[a-z0-9']+", text.lower()) for text in (said, heard))
    row = list(range(len(theirs) + 1))
    for i, word in enumerate(ours, start=1):
        previous, row[0] = row[0], i
        for j, other in enumerate(theirs, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1], len(ours)


ENGINES = {"nanopage": run_nanopage, "faster-whisper": run_faster_whisper}


def main(
    files: Annotated[list[Path], typer.Argument(exists=True)],
    model: Annotated[Path, typer.Option(exists=True, help="Directory of Whisper tiny.en in CTranslate2's format.")],
    dtype: Annotated[list[str], typer.Option(help="float32, bfloat16 or int8.")] = ["float32", "int8"],  # noqa: B006
    num_iters: Annotated[int, typer.Option(min=1)] = 3,
    peer_python: Annotated[Path, typer.Option(help="Python that has faster-whisper.")] = PEER,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure transcriptions by nanopage and by faster-whisper."""
    import soundfile

    seconds = [soundfile.info(file).duration for file in files]
    said = [file.with_suffix(".txt").read_text() for file in files if file.with_suffix(".txt").exists()]
    results = []
    for kind in dtype:
        for engine in ENGINES:
            python = sys.executable if engine == "nanopage" else str(peer_python)
            request = json.dumps([engine, str(model), kind, list(map(str, files)), num_iters])
            done = subprocess.run([python, "-m", "benchmarks.transcriptions", request], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{engine}: {done.stderr[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            wrong = [word_errors(*pair) for pair in zip(said, found["texts"], strict=len(said) == len(files))]
            found["word_error_rate"] = sum(pair[0] for pair in wrong) / max(1, sum(pair[1] for pair in wrong))
            results.append({"engine": engine, "dtype": kind} | found)
            typer.echo(
                f"{engine:15} {kind:9} load {found['load']:5.2f} s; {seconds[0]:.0f} s of sound in {found['one']:.2f} "
                f"s ({seconds[0] / found['one']:.1f} times real time); {len(files)} sounds, {sum(seconds):.0f} s, in "
                f"{found['many']:.2f} s ({sum(seconds) / found['many']:.1f} times); "
                f"{found['word_error_rate']:.1%} of words wrong; {found['MiB']} MiB"
            )
    if json_file is not None:
        json_file.write_text(json.dumps({"seconds": seconds, "results": results}, indent=1))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        engine, model, kind, paths, iters = json.loads(sys.argv[1])
        print(json.dumps(ENGINES[engine](model, kind, [Path(path) for path in paths], iters)))
    else:
        typer.run(main)
