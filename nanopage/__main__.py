"""The command `nanopage`, which is also `python -m nanopage`. Each subcommand is a function of nanopage/terminal/."""

import typer

from nanopage.terminal.chat import chat
from nanopage.terminal.program import run

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)
app.command()(chat)


@app.callback()
def nanopage() -> None:
    """A compact LLM inference engine."""


def main() -> int:
    return run(app)


if __name__ == "__main__":
    raise SystemExit(main())
