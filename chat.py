"""Talk to a model in the terminal.

python chat.py                                a conversation; Ctrl-C stops a reply, Ctrl-D leaves
python chat.py What is a KV cache?            one answer on stdout, everything else on stderr
git diff | python chat.py -p "Explain this"   the pipe is added to the prompt

Exit codes: 0 answered, 1 could not, 2 wrong usage, 130 stopped by Ctrl-C.
"""

import dataclasses
import json
import os
import random
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(rich_markup_mode=None, add_completion=False)
stderr = Console(stderr=True)


@app.command()
def main(
    words: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Answer this and leave.")] = None,
    model: Annotated[str | None, typer.Option(help="Directory, .gguf file or hub id [default: SmolLM2-135M].")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy [default: the model's own, else 0].")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling [default: the model's own, else 1].")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest reply: small models do not always find an end.")] = 1024,
    seed: Annotated[int | None, typer.Option(help="Make replies reproducible.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: go on with the text, for base models.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Replies as text, not as rendered Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The answer and its figures as a JSON object.")] = False,
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
    """Talk to a model in the terminal. With a prompt (arguments, -p or a pipe) answer once and leave.

    Exit codes: 0 answered, 1 could not, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    try:
        question = read_prompt(prompt, words)
        if as_json and question is None:
            fail("--json is for one answer: give -p, arguments or a pipe", code=2)
        if raw and system:
            fail("--system needs a chat template, and --raw goes without", code=2)

        from nanopage import EngineConfig, SamplingParams
        from nanopage.weights import hub

        asked = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
        asked = {name: value for name, value in asked.items() if value is not None}
        options = {
            "dtype": dtype,
            "device": device,
            "max_model_len": max_model_len,
            "kv_cache_gib": kv_cache_gib,
            "enforce_eager": eager,
            "async_scheduling": overlap,
            "quantization": quantization,
            "seed": random.getrandbits(32) if seed is None else seed,
        }
        SamplingParams(**asked)  # say what is wrong with them before anything is loaded
        EngineConfig(**options)
        path = hub.resolve(model)

        from nanopage import LLM

        loading = f"Loading {escape(path.name)}: {weights_gb(path):.1f} GB of weights"
        with stderr.status(loading) as status:

            def show(done: int, total: int) -> None:
                status.update(f"{loading}, {done / total:.0%}")

            llm = LLM(str(path), on_progress=show, **options)
        if not raw and llm.get_tokenizer().chat_template is None:
            fail(f"{path.name} has no chat template: it is a base model. --raw lets it go on with your text as it is")
        params = llm.get_default_sampling_params()
        if params == SamplingParams():  # the model recommends nothing: a small one is at its best without chance
            params = SamplingParams(temperature=0)
        params = dataclasses.replace(params, **asked)
        if question is None:
            # Only now: a single answer needs none of this, and shall not wait for it.
            from terminal.conversation import Conversation
            from terminal.session import Session

            code = Conversation(llm, Session(params, system, model=path.name), raw, plain).run()
        else:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": question})
            code = answer(llm, question if raw else messages, params, plain, path.name if as_json else None)
    except KeyboardInterrupt:
        code = 130
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        fail(str(error))
    raise SystemExit(code)


def read_prompt(prompt: str | None, words: list[str] | None) -> str | None:
    """What to answer once: -p or the arguments, and what is piped in; None for a conversation."""
    if prompt is not None and words:
        fail(f"a prompt with -p and another one: {' '.join(words)}", code=2)
    given = prompt if prompt is not None else " ".join(words) if words else None
    if sys.stdin is None or sys.stdin.isatty():
        piped = ""
        if given is None and sys.stdin is not None:
            return None
    else:
        piped = sys.stdin.read().strip()
    question = "\n\n".join(part for part in (given, piped) if part)
    if not question.strip():
        fail("nothing to answer: the prompt is empty", code=2)
    return question


def answer(llm, prompt, params, plain: bool, json_model: str | None) -> int:
    """One answer on stdout, as text (its figures on stderr) or with the model's name as JSON. Returns the exit code."""
    from terminal.reply import generate

    reply = generate(llm, prompt, params, plain, show=json_model is None)
    if reply is None:  # Ctrl-C came first
        return 130
    if json_model is None:
        stderr.print(f"[dim]{reply.footer()}[/dim]", highlight=False, soft_wrap=True)
    else:
        figures = dataclasses.asdict(reply)
        del figures["token_ids"]
        print(json.dumps({"model": json_model} | figures, ensure_ascii=False), flush=True)
    return 130 if reply.finish_reason == "abort" else 0


def weights_gb(path) -> float:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files) / 1e9


def fail(message: str, code: int = 1) -> None:
    stderr.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


if __name__ == "__main__":
    app()
