"""`nanopage transcribe`: sound files to text and subtitles, all in the batches of one engine."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from nanopage.terminal.chat import decoded, refuse
from nanopage.terminal.program import command
from nanopage.terminal.spinner import spinner
from nanopage.terminal.text import describe_error, printable, say, say_error, stderr
from nanopage.vllm.engine_args import EngineArgs, takes_engine_options

if TYPE_CHECKING:
    from nanopage.aio.async_llm import AsyncLLM
    from nanopage.audio.transcription import Options

DEFAULT_MODEL = "whisper-tiny.en"
FILES_AT_ONCE = 64  # open files; how many windows run together is up to the engine
Format = StrEnum("Format", "text srt vtt json verbose_json")  # as audio.formats.FORMATS, for which --help need not wait
Kind = StrEnum("Kind", "transcribe translate")


@takes_engine_options("device", "dtype", "quantization", "kv_cache_gib", "max_num_seqs", "enforce_eager")
@command
def transcribe(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="WAV, FLAC, MP3 or OGG.")],
    model: Annotated[str, typer.Option(help="Directory or hub id of a Whisper model.")] = DEFAULT_MODEL,
    language: Annotated[str | None, typer.Option(help="Code or English name [default: found in the sound].")] = None,
    task: Annotated[Kind, typer.Option(help="translate: into English.")] = Kind.transcribe,
    prompt: Annotated[str, typer.Option(help="What might come before: names, spelling, style.")] = "",
    temperature: Annotated[float, typer.Option(help="Of the first attempt at 30 seconds, from 0 to 1.")] = 0.0,
    context: Annotated[bool, typer.Option(help="Go on from the text of the 30 seconds before.")] = False,
    words: Annotated[
        bool, typer.Option("--word-timestamps", help="When each word is said: in JSON, or as subtitles of words.")
    ] = False,
    output_format: Annotated[Format, typer.Option("--output-format", "-f", help="What to write.")] = Format.text,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Write a file there for each sound [default: stdout].")
    ] = None,
    *,
    switches: dict[str, Any],
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the engine's log and tracebacks.")] = False,
) -> int:
    """Write what is said in sound files. A file that cannot be read does not stop the others.

    Exit codes: 0 all transcribed, 1 at least one is not, 2 wrong usage, 130 stopped by Ctrl-C, 128 + N ended by
    signal N.
    """
    from nanopage.audio.files import import_libraries
    from nanopage.audio.languages import language_code
    from nanopage.audio.transcription import Options

    import_libraries()
    try:
        code = None if language is None else language_code(language)
        options = Options(code, task, decoded(prompt, "--prompt"), temperature, context, words)
        if words and output_format is Format.text:
            raise ValueError("--word-timestamps needs --output-format srt, vtt, json or verbose_json")
        targets = _targets(files, output_format, output_dir)
    except ValueError as error:
        refuse(str(error))
    jobs = Jobs(options, targets, output_format, verbose)
    if not jobs.open_any():  # before the model loads
        return 1
    with spinner(f"Loading {model}"):
        from nanopage.aio.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(EngineArgs(model=model, **switches))
    try:
        asyncio.run(jobs.run(llm))
    finally:
        llm.shutdown()
    return 1 if jobs.num_failed else 0


def _targets(files: list[Path], output_format: str, directory: Path | None) -> dict[Path, Path | None]:
    """The file that each transcript goes to; None: to stdout. Raises: ValueError if two would go to one place."""
    from nanopage.audio.formats import FORMATS

    files = list(dict.fromkeys(files))
    if directory is None:
        if len(files) > 1 and output_format != "text":
            raise ValueError(f"--output-format {output_format} of several files needs --output-dir")
        return dict.fromkeys(files)
    targets = {file: directory / f"{file.stem}.{FORMATS[output_format][0]}" for file in files}
    for target, count in Counter(targets.values()).items():
        if count > 1:
            raise ValueError(f"{count} files would be written to {target}: transcribe them into different directories")
    directory.mkdir(parents=True, exist_ok=True)
    return {**targets}


@dataclass
class Jobs:
    """The files of a command."""

    options: "Options"
    targets: dict[Path, Path | None]  # file -> where its transcript goes; None: to stdout, in the order of the files
    output_format: str
    verbose: bool  # show tracebacks
    num_failed: int = 0

    def open_any(self) -> bool:
        """Whether any of the files can be opened. Drops the others, and says why."""
        from nanopage.audio.files import Sound

        for file in list(self.targets):
            try:
                Sound(file).close()
            except Exception as error:
                self._fail(file, error)
                del self.targets[file]
        return bool(self.targets)

    async def run(self, llm: "AsyncLLM") -> None:
        """Transcribe all files. Those that fail are counted."""
        from nanopage.audio.rules import read_speech_tokens, rules_for
        from nanopage.audio.words import Aligner

        tokens, slots = read_speech_tokens(llm.engine), asyncio.Semaphore(FILES_AT_ONCE)
        rules_for(tokens, self.options.language, self.options.task)  # what is wrong for all is said once
        if self.options.words:
            Aligner(llm, tokens)
        columns = (TextColumn("{task.description}"), BarColumn(), _Done(), TimeElapsedColumn())
        with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:

            async def one(file: Path) -> str:
                """What is to be printed."""
                async with slots:
                    task = progress.add_task(_shown(file), total=None)
                    try:
                        return self._write(file, await self._transcribe(llm, tokens, file, progress, task))
                    except Exception as error:
                        self._fail(file, error)
                        return ""
                    finally:
                        progress.remove_task(task)

            waiting = [asyncio.create_task(one(file)) for file in self.targets]
            try:
                while waiting:
                    text = await waiting[0]
                    del waiting[0]
                    print(text, end="", flush=True)
            finally:  # a signal does not lose texts that wait for others
                ended = [task for task in waiting if task.done() and not task.cancelled() and task.exception() is None]
                print("".join(task.result() for task in ended), end="", flush=True)

    async def _transcribe(self, llm: "AsyncLLM", tokens: Any, file: Path, progress: Progress, task: TaskID) -> str:
        from nanopage.audio.files import Sound
        from nanopage.audio.formats import FORMATS
        from nanopage.audio.transcription import Transcription

        sound = Sound(file)
        try:
            job = Transcription(llm, tokens, sound, self.options)
            async for _ in job.run():
                progress.update(task, total=max(sound.seconds, job.position), completed=job.position)
        finally:
            sound.close()
        make: Callable[[Transcription], str] = FORMATS[self.output_format][1]
        return make(job)

    def _write(self, file: Path, text: str) -> str:
        """Write a transcript, if it goes to a file. Returns what is to be printed."""
        if (target := self.targets[file]) is None:
            return printable(f"{file}:\n{text}" if len(self.targets) > 1 else text)
        target.write_text(text, encoding="utf-8")
        say(f"{file}: {target}")
        return ""

    def _fail(self, file: Path, error: Exception) -> None:
        self.num_failed += 1
        say_error(f"{file}: {describe_error(error, self.verbose)}")


class _Done(ProgressColumn):
    """How much of a sound is done, and how many times faster than it plays."""

    def render(self, task: Task) -> Text:
        if not task.total:
            return Text("")
        speed = f", {task.completed / task.elapsed:.1f}x" if task.elapsed and task.completed else ""
        return Text(f"{task.completed:.0f}/{task.total:.0f} s{speed}")


def _shown(file: Path) -> str:
    name = printable(file.name).replace("\n", " ").replace("[", "(")  # brackets are rich's markup
    return name if len(name) <= 40 else f"{name[:37]}..."
