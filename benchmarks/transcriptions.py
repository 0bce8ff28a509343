"""Speech to text beside faster-whisper, whisper.cpp and transformers: one sound, many at once, and wrong words.

    python3 -m venv ~/.cache/nanopage/peers/fasterwhisper
    ~/.cache/nanopage/peers/fasterwhisper/bin/pip install faster-whisper soundfile typer
    python -m benchmarks.transcriptions talks/*.wav --model DIRECTORY --json results.json
    python -m benchmarks.transcriptions hour.wav --model DIRECTORY --num-iters 1

whisper_cpp.py says how whisper.cpp is installed. An engine that is not installed is named and left out. All run the
same file, a Whisper in CTranslate2's format; whisper.cpp gets it in its own format. Next to a sound, a .txt file may
have what is said in it. All search greedily, with timestamps, without the text before as context, and with higher
temperatures where a text is poor. nanopage runs all sounds together. faster-whisper and whisper.cpp run them one after
the other with all threads, or two at a time with half of them: the faster way counts. transformers runs them one after
the other, in float32 alone. Each engine has a process of its own. Times are medians, after one sound to warm up. The
first text is timed from the start of the process. Before each time is taken, nanopage forgets what it keeps of sounds.

With transformers, the greedy tokens of the first 30 seconds of each sound are compared, without timestamps and with
them. Each engine makes its own spectrogram. Whisper's blank first tokens are not suppressed then.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

PEERS = Path.home() / ".cache/nanopage/peers"
MAX_TOKENS = 224  # of a window
NOT_INSTALLED = 3  # exit code


@dataclass(frozen=True)
class Work:
    """What an engine is asked for.

    model: a directory. files: of sounds. compares: whether `tokens` of the answer has the greedy tokens of each sound,
    without timestamps and with them. started: when its process was started, as `time.time` says.
    """

    engine: str
    model: str
    dtype: str
    files: list[str]
    num_iters: int
    compares: bool
    started: float

    def measure(
        self, first: Callable[[], float], one: Callable, ways: list[Callable], forget: Callable = lambda: None
    ) -> dict:
        """Seconds to the first text, for one sound and for all; the texts; the memory of the process.

        Args:
            first: makes the first text of the first sound. Returns when, as `time.time` says.
            one: makes the whole text of the first sound.
            ways: to make the texts of all sounds. The fastest counts.
            forget: called before each measurement.
        """
        found: dict[str, Any] = {"first": first() - self.started}
        one()

        def timed(function: Callable) -> tuple[float, Any]:
            times = []
            for _ in range(self.num_iters):
                forget()
                started = time.perf_counter()
                made = function()
                times.append(time.perf_counter() - started)
            return statistics.median(times), made

        found["one"], _ = timed(one)
        seconds, found["texts"] = timed(ways[0])
        peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        found["MiB"] = int(peak[1]) // 1024 if peak else 0
        return found | {"many": min([seconds, *(timed(way)[0] for way in ways[1:])])}


def run_nanopage(work: Work) -> dict:
    import asyncio

    from nanopage.aio.async_llm import AsyncLLM
    from nanopage.audio.files import Sound
    from nanopage.audio.rules import read_speech_tokens
    from nanopage.audio.transcription import Options, Transcription
    from nanopage.params import SamplingParams
    from nanopage.vllm.engine_args import EngineArgs

    options = {"quantization": "int8", "dtype": "bfloat16"} if work.dtype == "int8" else {"dtype": work.dtype}
    llm = AsyncLLM.from_engine_args(EngineArgs(model=work.model, **options))
    executor: Any = llm.engine.executor
    tokens, loop = read_speech_tokens(llm.engine), asyncio.new_event_loop()

    async def one(file: str, whole: bool = True) -> str:
        job = Transcription(llm, tokens, Sound(Path(file)), Options("en"))
        async for segments in job.run():
            if segments and not whole:
                break
        return job.text

    async def greedy(file: str) -> list[list[int]]:
        job = Transcription(llm, tokens, Sound(Path(file)), Options("en"))
        samples = job.sound.window(0)
        spoken = [tokens.languages["en"], tokens.tasks["transcribe"]] if tokens.languages else []
        prompt = {"prompt_token_ids": [tokens.start, *spoken, tokens.begin - 1]}
        allowed = sorted({*range(tokens.begin)} - tokens.suppressed)
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, allowed_token_ids=allowed, detokenize=False)
        sound = {"multi_modal_data": {"audio": (samples, 16_000)}}
        outputs = [output async for output in llm.generate(prompt | sound, params, file)]
        plain = [token_id for token_id in outputs[-1].outputs[0].token_ids if token_id != tokens.end]
        return [plain, (await job.attempt(samples, 0.0, 0)).tokens]

    async def many(function: Callable, files: list[str]) -> list:
        return await asyncio.gather(*map(function, files))

    def forget() -> None:
        executor.worker.wings.items.forget()
        loop.run_until_complete(llm.reset_prefix_cache())

    def first() -> float:
        loop.run_until_complete(one(work.files[0], whole=False))
        return time.time()

    def compiled() -> list:
        executor.compile()
        return loop.run_until_complete(many(one, work.files[:1]))

    found = work.measure(first, compiled, [lambda: loop.run_until_complete(many(one, work.files))], forget)
    if work.compares:
        found["tokens"] = loop.run_until_complete(many(greedy, work.files))
    llm.shutdown()
    return found


def run_transformers(work: Work) -> dict:
    import torch
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from nanopage.audio.files import Sound
    from nanopage.weights import hub

    directory = hub.resolve(work.model)
    whisper: Any = WhisperForConditionalGeneration.from_pretrained(directory, dtype=getattr(torch, work.dtype)).eval()
    extractor, tokenizer = WhisperFeatureExtractor.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    config = whisper.generation_config
    config.prev_sot_token_id = tokenizer.convert_tokens_to_ids("<|startofprev|>")
    config.max_initial_timestamp_index = 50
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

    def one(file: str) -> str:
        said = generate(
            read_whole(file),
            return_timestamps=True,
            condition_on_prev_tokens=False,
            temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
            compression_ratio_threshold=1.35,  # transformers' own, of tokens
            logprob_threshold=-1.0,
            no_speech_threshold=0.6,
        )
        return str(tokenizer.decode([token_id for token_id in said if token_id < config.eos_token_id]))

    def greedy(file: str) -> list[list[int]]:
        samples = Sound(Path(file)).window(0)
        options: dict[str, Any] = {"max_new_tokens": MAX_TOKENS, "force_unique_generate_call": True}
        return [generate(samples, return_timestamps=times, **options) for times in (False, True)]

    torch.manual_seed(0)

    def first() -> float:
        one(work.files[0])
        return time.time()

    found = work.measure(first, lambda: one(work.files[0]), [lambda: list(map(one, work.files))])
    config.begin_suppress_tokens = None
    return found | {"tokens": list(map(greedy, work.files)) if work.compares else []}


def run_faster_whisper(work: Work) -> dict:
    from faster_whisper import WhisperModel

    def load(**sizes: int) -> WhisperModel:
        return WhisperModel(work.model, device="cpu", compute_type=work.dtype, **sizes)

    def segments(model: WhisperModel, file: str) -> Any:
        return model.transcribe(file, beam_size=1, best_of=1, condition_on_previous_text=False)[0]

    def one(model: WhisperModel, file: str) -> str:
        return "".join(segment.text for segment in segments(model, file))

    def by_halves() -> list[str]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(partial(one, halves()), work.files))

    whole, halves = load(cpu_threads=2), cache(lambda: load(cpu_threads=1, num_workers=2))
    alone = partial(one, whole)
    ways = [lambda: list(map(alone, work.files)), by_halves]

    def first() -> float:
        next(iter(segments(whole, work.files[0])))
        return time.time()

    return work.measure(first, lambda: alone(work.files[0]), ways)


def run_whisper_cpp(work: Work) -> dict:
    from pywhispercpp.model import Model

    from benchmarks.whisper_cpp import write_ggml

    def load(num_threads: int) -> Model:
        return Model(str(path), n_threads=num_threads, language="en", greedy={"best_of": 1}, print_progress=False)

    def segments(model: Model, file: str, **options: Any) -> list:
        return model.transcribe(read_whole(file), **options)

    def texts(model: Model, files: list[str]) -> list[str]:
        return [" ".join(segment.text for segment in segments(model, file)) for file in files]

    def first() -> float:
        times: list[float] = []
        segments(whole, work.files[0], new_segment_callback=lambda segment: times.append(time.time()))
        return times[0]

    def by_halves() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(texts, halves(), (work.files[::2], work.files[1::2])))

    started = time.time()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ggml.bin"
        write_ggml(Path(work.model), path, work.dtype)
        work = replace(work, started=work.started + time.time() - started)
        whole, halves = load(2), cache(lambda: (load(1), load(1)))
        ways = [lambda: texts(whole, work.files), by_halves]
        return work.measure(first, lambda: texts(whole, work.files[:1]), ways)


def read_whole(file: str) -> np.ndarray:
    """All samples of a sound, at 16 kHz."""
    from nanopage.audio.files import Sound

    sound, pieces = Sound(Path(file)), list[np.ndarray]()
    while len(piece := sound.window(sum(map(len, pieces)))):
        pieces.append(piece.copy())
    return np.concatenate(pieces)


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


ENGINES = {
    "nanopage": run_nanopage,
    "faster-whisper": run_faster_whisper,
    "whisper.cpp": run_whisper_cpp,
    "transformers": run_transformers,
}


def python_of(engine: str, peers: Path) -> Path:
    """The Python that runs an engine: this one, or that of an environment of its own."""
    own = engine in ("nanopage", "transformers")
    return Path(sys.executable) if own else peers / re.sub(r"\W", "", engine) / "bin/python"


def ask(work: Work, python: Path) -> dict | str:
    """Run an engine. Returns its results, or a string that says why it cannot run here."""
    if not python.exists():
        return f"there is no {python}"
    command = [str(python), "-m", "benchmarks.transcriptions", json.dumps(asdict(work))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == NOT_INSTALLED:
        return done.stderr.splitlines()[-1]
    if done.returncode:
        raise SystemExit(f"{work.engine}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(found: dict, seconds: list[float], said: list[str]) -> None:
    """Print what an engine has done. Args: seconds: of each sound. said: in each sound; empty if that is not known."""

    def pace(took: float, length: float) -> str:
        return f"{took:.2f} s ({length / took:.1f} times real time)"

    one, many = pace(found["one"], seconds[0]), pace(found["many"], sum(seconds))
    typer.echo(
        f"{found['engine']:15} {found['dtype']:9} first text after {found['first']:.2f} s; {seconds[0]:.0f} s of sound "
        f"in {one}; {len(seconds)} sounds, {sum(seconds):.0f} s, in {many}; {found['MiB']} MiB"
    )
    if said:
        pairs = list(zip(said, found["texts"], strict=True))
        wrong, total = map(sum, zip(*(word_errors(*pair) for pair in pairs), strict=True))
        gap, repeat = map(max, zip(*(gap_and_repeat(*pair) for pair in pairs), strict=True))
        share = f"{wrong} of {total} words wrong ({wrong / total:.1%})"
        typer.echo(f"{'':15} {share}; in one place, at most {gap} missing and {repeat} too many")


def main(
    files: Annotated[list[Path], typer.Argument(exists=True)],
    model: Annotated[Path, typer.Option(exists=True, help="Directory of a Whisper in CTranslate2's format.")],
    dtype: Annotated[list[str], typer.Option(help="float32, bfloat16 or int8.")] = ["float32", "int8"],  # noqa: B006
    engine: Annotated[list[str], typer.Option(help=f"Of {', '.join(ENGINES)}.")] = [*ENGINES],  # noqa: B006
    num_iters: Annotated[int, typer.Option(min=1)] = 3,
    peers: Annotated[Path, typer.Option(help="The folder of the environments of other engines.")] = PEERS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure transcriptions by nanopage, faster-whisper, whisper.cpp and transformers."""
    import soundfile

    if unknown := {*engine} - {*ENGINES}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not one of {', '.join(ENGINES)}")
    seconds = [soundfile.info(file).duration for file in files]
    said = [file.with_suffix(".txt").read_text() for file in files if file.with_suffix(".txt").exists()]
    results = []
    for kind in dtype:
        engines = [name for name in engine if name != "transformers" or kind == "float32"]
        for name in engines:
            compares, started = "transformers" in engines, time.time()
            work = Work(name, str(model), kind, list(map(str, files)), num_iters, compares, started)
            found = ask(work, python_of(name, peers))
            if isinstance(found, str):
                typer.echo(f"{name:15} {kind:9} is not installed, and left out: {found}")
                continue
            results.append({"engine": name, "dtype": kind} | found)
            report(results[-1], seconds, said if len(said) == len(files) else [])
        tokens = {each["engine"]: each["tokens"] for each in results if each["dtype"] == kind and each.get("tokens")}
        if tokens.keys() >= {"nanopage", "transformers"}:
            plain, timed = equal_clips(tokens["nanopage"], tokens["transformers"])
            typer.echo(f"tokens equal to transformers': {plain} of {len(files)} without timestamps, {timed} with them")
    if json_file is not None:
        json_file.write_text(json.dumps({"seconds": seconds, "results": results}, indent=1))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work = Work(**json.loads(sys.argv[1]))
        try:
            print(json.dumps(ENGINES[work.engine](work)))
        except ImportError as error:
            print(error, file=sys.stderr)
            sys.exit(NOT_INSTALLED)
    else:
        typer.run(main)
