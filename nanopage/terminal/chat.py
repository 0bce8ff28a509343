"""Talk to a model in the terminal.

nanopage chat                                a conversation; Ctrl-C stops a reply, Ctrl-D leaves
nanopage chat What is a KV cache?            one answer on stdout, everything else on stderr
git diff | nanopage chat -p "Explain this"   the pipe is added to the prompt
nanopage chat --image cat.png What is this?  for models that see images

Exit codes: 0 answered, 1 could not, 2 wrong usage, 130 stopped by Ctrl-C, 128 + N ended by signal N.
"""

import dataclasses
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from nanopage.terminal.program import run_command
from nanopage.terminal.signals import interruptible, unechoed
from nanopage.terminal.spinner import spinner
from nanopage.terminal.text import say, say_error
from nanopage.vllm.engine_args import takes_engine_options

CHUNK = 256  # tokens of a prompt that a CPU reads between two checks for Ctrl-C


@takes_engine_options(
    *("dtype", "device", "max_model_len", "kv_cache_gib", "kv_cache_dtype", "quantization", "enforce_eager"),
    "async_scheduling",
)
def chat(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Answer this and leave.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Directory, .gguf file or hub id [default: SmolLM2-135M-Instruct].")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="An image for the prompt; may be repeated.")] = None,
    go_on: Annotated[bool, typer.Option("--continue", help="Go on with the last conversation.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy [default: the model's own, else 0].")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling [default: the model's own, else 1].")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of a reply [default: 1024].")] = None,
    seed: Annotated[int | None, typer.Option(help="Make replies reproducible.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: go on with the text, for base models.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Replies as text, not as rendered Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The answer and its figures as a JSON object.")] = False,
    tools: Annotated[
        Path | None, typer.Option(help="Python file: the model may call its functions, which you confirm.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="What the engine does, and tracebacks.")] = False,
    *,
    switches: dict[str, Any],
) -> None:  # fmt: skip
    """Talk to a model in the terminal. With a prompt (arguments, -p or a pipe) answer once and leave.

    Exit codes: 0 answered, 1 could not, 2 wrong usage, 130 stopped by Ctrl-C, 128 + N ended by signal N.
    """

    def work() -> int:
        talks = prompt is None and not words and sys.stdin is not None and sys.stdin.isatty()
        why_not = "there is a prompt to answer" if prompt is not None or words else "stdin is not a terminal"
        if as_json and talks:
            refuse("--json is for one answer: give -p, arguments or a pipe")
        if go_on and not talks:
            refuse(f"--continue is for a conversation, and {why_not}")
        if image and talks:
            refuse("--image is for one answer: in a conversation, /image FILE sends one with the next message")
        if image and raw:
            refuse("--image needs a chat template, and --raw goes without")
        if tools is not None and not tools.is_file():
            refuse(f"--tools: no file {tools}")
        if tools is not None and not talks:
            refuse(f"--tools is for a conversation, where you confirm each call, and {why_not}")
        if tools is not None and raw:
            refuse("--tools needs a chat template, and --raw goes without")
        question = None if talks else read_prompt(prompt, words)
        instructions = decoded(system or "", "--system") or None
        if raw and instructions:
            refuse("--system needs a chat template, and --raw goes without")
        given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
        asked = {name: value for name, value in given.items() if value is not None}
        options = switches | {
            "max_num_seqs": 4,  # a conversation has one request at a time: this bounds the KV cache
            "seed": random.getrandbits(32) if seed is None else seed,
        }
        load = loader(options, asked, raw)
        if question is None:
            changes = asked if go_on else None
            return converse(load, model, instructions, changes, raw, plain, verbose, ctx.command_path, tools)
        messages: list[dict] = [{"role": "system", "content": instructions}] if instructions else []
        messages.append({"role": "user", "content": with_images(question, model, image or [])})
        return answer(load, model, question if raw else messages, plain, as_json)

    run_command(work, verbose)


def loader(options: dict, asked: dict, raw: bool) -> Callable:
    """Make the function that loads a model. It takes --model and returns the LLM, its name and its sampling settings.

    Raises: ValueError, TypeError for options that are wrong whatever the model is.
    """
    from nanopage import EngineConfig, SamplingParams
    from nanopage.weights import hub

    SamplingParams(**asked)
    EngineConfig(**options)

    def load(model: str | None):
        path = hub.resolve(model)
        name = hub.name_of(model)
        loading = f"Loading {name}: {weights_gb(path):.1f} GB of weights"
        with spinner(loading) as update:
            from nanopage import LLM
            from nanopage.device import resolve_device

            on_cpu = resolve_device(options["device"]).type == "cpu"
            chunk = {"max_num_batched_tokens": CHUNK} if on_cpu else {}

            def show(done: int, total: int) -> None:
                update(f"{loading}, {done / total:.0%}")

            llm = LLM(str(path), on_progress=show, **options, **chunk)
        if not raw and llm.get_tokenizer().chat_template is None:
            raise ValueError(f"{name} has no chat template: it is a base model. --raw lets it go on with your text")
        params = llm.get_default_sampling_params()
        if params == SamplingParams():  # the model changes nothing: greedy decoding is best for small models
            params = SamplingParams(temperature=0)
        # Small models do not always find an end.
        return llm, name, dataclasses.replace(params, **{"max_tokens": 1024} | asked)

    return load


def converse(
    load: Callable,
    model: str | None,
    system: str | None,
    changes: dict | None,
    raw: bool,
    plain: bool,
    verbose: bool,
    program: str,
    tools: Path | None = None,
) -> int:
    """A conversation at the terminal. Returns the exit code.

    Args:
        tools: a Python file with functions that the model may call.
        changes: go on with the last conversation, with these changes of its settings; None begins a new one.
        program: the command with which the user can start the program again.
    """
    from nanopage.terminal.kept import Kept, may_keep
    from nanopage.terminal.session import state_directory

    kept = Kept(state_directory() / "conversations") if may_keep() else None
    last = None
    if changes is not None:
        if kept is None:
            refuse("--continue: NANOPAGE_HISTORY=0 keeps no conversations")
        elif not (last := next(iter(kept.earlier()), None)):
            refuse("--continue: no conversation is kept")
    toolbox = None
    if tools is not None:
        from nanopage.terminal.tools import Toolbox

        toolbox = Toolbox(tools, input)
    with unechoed():
        llm, name, params = load(model)
        if toolbox is not None:
            toolbox.format_of(llm.get_tokenizer().template_for(True))

        from nanopage.terminal.commands import WITH_ALIASES
        from nanopage.terminal.conversation import Conversation
        from nanopage.terminal.session import Session

        session = Session(params, system, model=name)
        conversation = Conversation(llm, session, WITH_ALIASES, raw, plain, verbose, kept, model, load, toolbox)
        del llm  # /model frees it
        say(f"{conversation.describe_model()}. /help lists commands, Ctrl-D leaves.")
        if last is not None and changes is not None:
            conversation.load_file(last, system, changes)
    code = conversation.run()
    if code == 0 and conversation.kept is not None and conversation.session.messages:
        say(f"The conversation is kept: {program} --continue goes on with it.")
    return code


def read_prompt(prompt: str | None, words: list[str] | None) -> str:
    """What to answer once: -p or the arguments, and what is piped in."""
    if prompt is not None and words:
        refuse(f"a prompt with -p and another one: {' '.join(words)}")
    given, piped = prompt if prompt is not None else " ".join(words or []), ""
    if sys.stdin is not None and not sys.stdin.isatty():
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        piped = decoded(sys.stdin.read(), "stdin").strip()
    question = "\n\n".join(part for part in (decoded(given, "the prompt"), piped) if part)
    if not question.strip():
        refuse("nothing to answer: the prompt is empty")
    return question


def decoded(text: str, name: str) -> str:
    """Replace bytes that Python could not decode, which it keeps as surrogates, by U+FFFD. Says so if there are any."""
    try:
        text.encode()
    except UnicodeEncodeError:
        say(f"{name} is not UTF-8: what could not be decoded is U+FFFD now", "yellow")
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text


def with_images(question: str, model: str | None, files: list[Path]) -> str | list[dict]:
    """The content of a message, with the images of these files. Raises: ValueError, OSError naming what is wrong."""
    if not files:
        return question
    from nanopage.terminal.images import Images, check_sight
    from nanopage.weights import hub, loader

    images = Images()
    kept = [images.add(str(file)) for file in files]
    check_sight(loader.read_config(hub.resolve(model)), hub.name_of(model))
    return images.put([{"role": "user", "content": question, "images": kept}])[0]["content"]


def answer(load: Callable, model: str | None, asked: str | list[dict], plain: bool, as_json: bool) -> int:
    """One answer on stdout, as text (its figures on stderr) or as JSON. Returns the exit code.

    Args: asked: a text to go on with, or messages.
    """
    with unechoed():
        llm, name, params = load(model)

    from nanopage.terminal.reply import encode, generate

    prompt = encode(llm, asked)
    with interruptible() as interrupt:
        reply = generate(llm, prompt, params, interrupt, plain, show=not as_json)
    if reply is None:  # Ctrl-C came before the first token
        return 130
    if as_json:
        figures = dataclasses.asdict(reply)
        del figures["token_ids"]
        text = json.dumps({"model": name} | figures, ensure_ascii=False)
        # DEL and C1, which JSON allows, could move a terminal's cursor.
        print(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)
    else:
        if ending := reply.ending(params.max_tokens):
            say(ending)
        say(reply.footer(llm.engine.max_model_len))
    if reply.error is not None:
        return 1
    return 0 if interrupt.signum is None else 130


def weights_gb(path: Path) -> float:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files) / 1e9


def refuse(message: str) -> NoReturn:
    """Leave with exit code 2: wrong usage."""
    say_error(message)
    raise SystemExit(2)
