"""Talk to a model in the terminal.

python chat.py                                a conversation; Ctrl-C stops a reply, Ctrl-D leaves
python chat.py -p "What is a KV cache?"       one answer on stdout, everything else on stderr
git diff | python chat.py -p "Explain this"   the pipe is added to the prompt
"""

import contextlib
import dataclasses
import os
import random
import signal
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(rich_markup_mode=None, add_completion=False)
stderr = Console(stderr=True)


@app.command()
def main(
    model: Annotated[str | None, typer.Option(help="Directory, .gguf file or hub id [default: SmolLM2-135M].")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy [default: the model's own, else 0].")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling [default: the model's own, else 1].")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest reply: small models do not always find an end.")] = 1024,
    seed: Annotated[int | None, typer.Option(help="Make replies reproducible.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of a conversation.")] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="Size of the KV cache in GiB.")] = None,
    quantization: Annotated[str | None, typer.Option(help="int8: weights in a byte each, on a CPU.")] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Use no compiled code, and compile none.")] = False,
    overlap: Annotated[
        bool | None, typer.Option(help="Launch a step before the last one's token is seen [default: on a GPU].")
    ] = None,
) -> None:  # fmt: skip
    """Talk to a model in the terminal. Without a terminal on stdin, or with -p, answer once and leave."""
    one_shot = prompt is not None or not sys.stdin.isatty()
    if one_shot:
        piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
        prompt = "\n\n".join(part for part in (prompt, piped) if part)
        if not prompt.strip():
            fail("nothing to answer: the prompt is empty", code=2)

    from nanopage import SamplingParams, hub

    asked = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    asked = {name: value for name, value in asked.items() if value is not None}
    try:
        SamplingParams(**asked)  # says what is wrong with them before anything is loaded
        from nanopage import LLM

        path = hub.resolve(model)
        with stderr.status(f"Loading {path.name}"):
            llm = LLM(
                str(path),
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                kv_cache_gib=kv_cache_gib,
                enforce_eager=eager,
                async_scheduling=overlap,
                quantization=quantization,
                seed=random.getrandbits(32) if seed is None else seed,
            )
        params = llm.get_default_sampling_params()
        if params == SamplingParams():  # the model recommends nothing: a small one is at its best without chance
            params = SamplingParams(temperature=0)
        params = dataclasses.replace(params, **asked)
        history = [{"role": "system", "content": system}] if system else []
        if one_shot:
            answer(llm, [*history, {"role": "user", "content": prompt}], params)
        else:
            converse(llm, history, params)
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        fail(str(error))


def converse(llm, history: list[dict], params) -> None:
    """Read messages and print replies until Ctrl-D. A message that can not be answered leaves the history as it was."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() line editing)
    stderr.print("[dim]Ctrl-C stops a reply, Ctrl-D leaves.[/dim]")
    while True:
        try:
            message = input("\n> ")
        except EOFError:
            stderr.print()
            return
        except KeyboardInterrupt:
            stderr.print("\n[dim]Ctrl-D leaves.[/dim]")
            continue
        if not message.strip():
            continue
        turn = [*history, {"role": "user", "content": message}]
        try:
            turn = drop_oldest(llm, turn)
            reply = answer(llm, turn, params)
        except (ValueError, TypeError) as error:
            stderr.print(f"[red]{escape(str(error))}[/red]", highlight=False, soft_wrap=True)
            continue
        history = [*turn, {"role": "assistant", "content": reply}]


def drop_oldest(llm, messages: list[dict]) -> list[dict]:
    """Leave out the oldest turns, system message kept, until a quarter of the context is free for the reply."""
    system = [m for m in messages[:1] if m["role"] == "system"]
    turns, dropped = messages[len(system) :], 0
    room = llm.engine.max_model_len * 3 // 4
    while len(turns) > 1 and llm.count_tokens(system + turns) > room:
        turns, dropped = turns[2:], dropped + 1
    if dropped:
        stderr.print(f"[dim]The context is full: left out the oldest {dropped} turn(s).[/dim]")
    return system + turns


def answer(llm, messages: list[dict], params) -> str:
    """Stream one reply to stdout. Ctrl-C ends it and keeps what came. Returns its text."""
    text, output = "", None
    with interruptible() as interrupted:
        for output in llm.stream(messages, params):
            completion = output.outputs[0]
            print(completion.delta, end="", flush=True)
            text = completion.text
            if interrupted():
                break
    print(flush=True)
    if output is None:
        return text
    metrics, completion = output.metrics, output.outputs[0]
    reason = completion.finish_reason or "stopped by Ctrl-C"
    decoding = metrics.token_times[-1] - metrics.token_times[0]
    speed = f"{(len(metrics.token_times) - 1) / decoding:.1f} tok/s, " if decoding else ""
    stderr.print(
        f"[dim]{len(output.prompt_token_ids)} tokens in ({output.num_cached_tokens} cached), "
        f"{len(completion.token_ids)} out, first after {metrics.time_to_first_token:.2f} s, {speed}{reason}[/dim]",
        highlight=False,
        soft_wrap=True,
    )
    return text


@contextlib.contextmanager
def interruptible() -> Iterator:
    """Ctrl-C sets a flag instead of raising in the middle of a step; a second one raises. Yields the flag's reader."""
    count = 0

    def handler(signum, frame):
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, previous)


def fail(message: str, code: int = 1) -> None:
    stderr.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


if __name__ == "__main__":
    app()
