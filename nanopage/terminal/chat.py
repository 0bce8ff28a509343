"""Talk to a model in the terminal.

nanopage chat                                  a conversation; Ctrl-C stops a reply, Ctrl-D leaves
nanopage chat What is a KV cache?              one answer on stdout, everything else on stderr
nanopage chat -p "Summarize this" < notes.txt  what is piped in is added to the prompt
nanopage chat --image cat.png What is this?    for models that see images
nanopage chat --url http://host:8000/v1        a model of a server of OpenAI's API

Exit codes: 0 answered, 1 could not, 2 wrong usage, 130 stopped by Ctrl-C, 128 + N ended by signal N.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from nanopage.terminal.program import command
from nanopage.terminal.signals import interruptible, unechoed
from nanopage.terminal.text import say, say_error
from nanopage.vllm.engine_args import takes_engine_options

if TYPE_CHECKING:
    from nanopage.terminal.loading import Load

# Chat models larger than the default, with the GB of their weights in 16 bits.
LARGER = {"Qwen/Qwen2.5-0.5B-Instruct": 1.0, "Qwen/Qwen2.5-1.5B-Instruct": 3.1, "Qwen/Qwen3-4B-Instruct-2507": 8.0}


@takes_engine_options(
    *("dtype", "device", "max_model_len", "kv_cache_gib", "kv_cache_dtype", "quantization", "enforce_eager"),
    "async_scheduling",
)
@command
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
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Talk to the server of OpenAI's API there; --model is its name.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server [default of --url: OPENAI_API_KEY].")] = None,
    alone: Annotated[
        bool, typer.Option("--no-attach", help="Load the model even if a nanopage server of yours runs here with it.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="What the engine does, and tracebacks.")] = False,
    *,
    switches: dict[str, Any],
) -> int:  # fmt: skip
    """Talk to a model in the terminal. With a prompt (arguments, -p or a pipe) answer once and leave.

    Exit codes: 0 answered, 1 could not, 2 wrong usage, 130 stopped by Ctrl-C, 128 + N ended by signal N.
    """
    talks = prompt is None and not words and sys.stdin is not None and sys.stdin.isatty()
    why_not = "there is a prompt to answer" if prompt is not None or words else "stdin is not a terminal"
    for wrong, message in (
        (as_json and talks, "--json is for one answer: give -p, arguments or a pipe"),
        (go_on and not talks, f"--continue is for a conversation, and {why_not}"),
        (image and talks, "--image is for one answer: in a conversation, /image FILE sends one with the next message"),
        (image and raw, "--image needs a chat template, and --raw goes without"),
        (tools and not tools.is_file(), f"--tools: no file {tools}"),
        (tools and not talks, f"--tools is for a conversation, where you confirm each call, and {why_not}"),
        (tools and raw, "--tools needs a chat template, and --raw goes without"),
    ):
        if wrong:
            refuse(message)
    question = None if talks else read_prompt(prompt, words)
    instructions = decoded(system or "", "--system") or None
    if raw and instructions:
        refuse("--system needs a chat template, and --raw goes without")
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    asked = {name: value for name, value in given.items() if value is not None}
    load = make_load(switches, asked, raw, tools is not None, url, api_key, not alone)
    if question is None:
        changes = asked if go_on else None
        return converse(load, model, instructions, changes, raw, plain, verbose, ctx.command_path, tools)
    messages: list[dict] = [{"role": "system", "content": instructions}] if instructions else []
    messages.append({"role": "user", "content": with_images(question, image or [])})
    return answer(load, model, question if raw else messages, bool(image), plain, as_json)


def make_load(
    switches: dict[str, Any], asked: dict, raw: bool, tools: bool, url: str | None, key: str | None, attach: bool
) -> "Load":
    """The loader that the options ask for. Raises: ValueError, TypeError for options that are wrong whatever the model
    is."""
    from nanopage import EngineConfig, SamplingParams
    from nanopage.terminal.calls import Server
    from nanopage.terminal.loading import FromHere, FromServer

    SamplingParams(**asked)
    if url is None:
        if key is not None and not attach:
            refuse("--api-key is for a server, and --no-attach uses none")
        Server.at("http://localhost", key)  # checks the key
        return FromHere(switches, asked, raw, tools, attach, key)
    if given := ", ".join(EngineConfig(**switches).given(*switches)):
        refuse(f"{given} is for an engine in this process, and --url names a server, whose engine has its own options")
    if not attach:
        refuse("--no-attach loads the model in this process, and --url names a server")
    return FromServer(Server.at(url, os.environ.get("OPENAI_API_KEY") or None if key is None else key), asked)


def converse(
    load: "Load",
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
    from nanopage.terminal.session import Kept, Session, may_keep, state_directory

    kept, last, toolbox = Kept(state_directory() / "conversations") if may_keep() else None, None, None
    if changes is not None:
        if kept is None:
            refuse("--continue: NANOPAGE_HISTORY=0 keeps no conversations")
        elif not (last := next(iter(kept.earlier()), None)):
            refuse("--continue: no conversation is kept")
    if tools is not None:
        from nanopage.terminal.tools import Toolbox

        toolbox = Toolbox(tools, input)
    with unechoed():
        loaded, name, params = load(model)

        from nanopage.terminal.commands import WITH_ALIASES
        from nanopage.terminal.conversation import Conversation

        session, capacity = Session(params, system, model=name), loaded.capacity
        conversation = Conversation(loaded, session, WITH_ALIASES, raw, plain, verbose, kept, model, load, toolbox)
        del loaded  # /model frees it
        say(f"{conversation.describe_model()}. /help lists commands, Ctrl-D leaves.")
        if capacity is not None:
            from nanopage.weights.hub import DEFAULT_MODEL

            if session.model == DEFAULT_MODEL:
                say(about_default(capacity.device, capacity.dtype))
        if last is not None and changes is not None:
            conversation.load_file(last, system, changes)
    code = conversation.run()
    if conversation.kept is not None and conversation.session.messages:
        say(f"The conversation is kept: {program} --continue goes on with it.")
    return code


def about_default(device: str, dtype: str) -> str:
    """What to expect of the default model, and the largest of LARGER that fits into the memory in this dtype."""
    import torch

    from nanopage.device import free_bytes

    on_cpu = device == "cpu"
    memory = free_bytes(torch.device(device)) if on_cpu else torch.cuda.get_device_properties(device).total_memory
    needed = 3e9 if dtype == "float32" else 1.5e9  # bytes for each GB of LARGER, with a KV cache
    fitting = [model for model, size in LARGER.items() if needed * size <= memory]
    text = "This is a small demonstration model, and often wrong."
    if fitting:
        text += f"\nA better one that fits the memory ({LARGER[fitting[-1]]} GB): /model {fitting[-1]}"
    return text


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


def with_images(question: str, files: list[Path]) -> str | list[dict]:
    """The content of a message, with the images of these files. Raises: ValueError, OSError naming what is wrong."""
    if not files:
        return question
    from nanopage.terminal.images import Images

    images = Images()
    kept = [images.add(str(file)) for file in files]
    return images.put([{"role": "user", "content": question, "images": kept}])[0]["content"]


def answer(load: "Load", model: str | None, asked: str | list[dict], sight: bool, plain: bool, as_json: bool) -> int:
    """One answer on stdout, as text (its figures on stderr) or as JSON. Returns the exit code.

    Args:
        asked: a text to go on with, or messages.
        sight: whether they have images.
    """
    with unechoed():
        loaded, name, params = load(model, sight)

    from nanopage.terminal.reply import Request, generate

    with interruptible() as interrupt:
        reply = generate(loaded, Request(asked, params), interrupt, plain, show=not as_json)
    if reply is None:  # Ctrl-C came before the first token
        return 130
    if as_json:
        text = json.dumps({"model": name} | reply.figures(), ensure_ascii=False)
        # DEL and C1, which JSON allows, could move a terminal's cursor.
        print(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)
    else:
        if ending := reply.ending(params.max_tokens):
            say(ending)
        say(reply.footer(loaded.max_model_len))
    if reply.error is not None:
        return 1
    return 0 if interrupt.signum is None else 130


def refuse(message: str) -> NoReturn:
    """Leave with exit code 2: wrong usage."""
    say_error(message)
    raise SystemExit(2)
