"""`nanopage grade`: runs random worlds on an engine of the build-up track, and tells what is wrong with it."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nanopage.terminal.program import command
from nanopage.terminal.text import printable


@command
def grade(
    directory: Annotated[Path, typer.Argument(help="The package, such as docs/build/mini. Its code is run.")],
    *,
    worlds: Annotated[int, typer.Option(min=1, help="How many random worlds to run.")] = 100,
    seed: Annotated[int, typer.Option(help="The number of the first world.")] = 0,
) -> int:
    """Compare an engine that you have written with nanopage and with itself, in random worlds: many requests at once,
    few blocks, chunks, shared prefixes, aborts. Shows the first difference as a story. Exits with 1 if there is one."""
    from nanopage.grading.grade import Reference, grade

    with tempfile.TemporaryDirectory(prefix="nanopage-grade-") as model_dir:
        story = grade(directory, worlds, seed, Reference(Path(model_dir)))
    typer.echo(printable(story) if story else f"Worlds {seed} to {seed + worlds - 1}: no difference.")
    return 1 if story else 0
