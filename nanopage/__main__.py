"""The command `nanopage`, which is also `python -m nanopage`."""

import importlib
import importlib.metadata
import os
import platform
import sys
from typing import Annotated, NoReturn

from nanopage.terminal.signals import leave_on_interrupt, raise_on_interrupt

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "nanopage":  # and not a test
    leave_on_interrupt()

import typer

import nanopage
from nanopage.terminal import models
from nanopage.terminal.chat import chat
from nanopage.terminal.compile import compile_layers
from nanopage.terminal.grade import grade
from nanopage.terminal.program import run
from nanopage.terminal.transcribe import transcribe
from nanopage.terminal.view import view

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.command()(chat)
app.command("compile")(compile_layers)
app.command()(transcribe)
app.command()(grade)
app.command("models")(models.models)
app.command()(models.show)
app.command()(models.pull)
app.command()(models.rm)
app.add_typer(models.cache, name="cache")
app.add_typer(view, name="view")
# Of commands that read their own options.
OTHERS_OPTIONS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command(context_settings=OTHERS_OPTIONS)
def serve(context: typer.Context) -> None:
    """Serve a model to clients of OpenAI's API (nanopage serve --help)."""
    run_part_of_server("serve", context.args)


@app.command("run-batch", context_settings=OTHERS_OPTIONS)
def run_batch(context: typer.Context) -> None:
    """Answer the requests of a file in OpenAI's batch format (nanopage run-batch --help)."""
    run_part_of_server("batch", context.args)


def run_part_of_server(module: str, arguments: list[str]) -> NoReturn:
    """Run the command of a module of `server/`, which reads its own options."""
    leave_on_interrupt()  # imports take seconds
    try:
        part = importlib.import_module(f"nanopage.server.{module}")
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'nanopage[serve]'") from error
    raise_on_interrupt()
    raise SystemExit(part.main(arguments))


def say_version(wanted: bool) -> None:
    """Print the versions of nanopage and of what it computes with, without importing them, and leave."""
    if wanted:
        others = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
        typer.echo(f"nanopage {nanopage.__version__} ({', '.join(others)}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A compact LLM inference engine."""


def main() -> int:
    return run(app, answers=sys.argv[1:2] != ["serve"])


if __name__ == "__main__":
    raise SystemExit(main())
