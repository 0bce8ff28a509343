"""`nanopage view export`: a recording of the live view as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from nanopage import escaped
from nanopage.terminal.chat import refuse
from nanopage.terminal.program import command
from nanopage.terminal.text import say

view = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Recordings of the live view.")


@view.command()
@command
def export(
    recording: Annotated[
        str,
        typer.Argument(
            metavar="RECORDING",
            help="A file of `bench.py serve --record` or of the page's Save button, or the name of a recording that "
            "comes with nanopage, such as preemption.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file.")],
) -> int:
    """Write a recording as one HTML file, which a browser shows without a server."""
    from nanopage.view.export import find_recording, make_page

    file = find_recording(recording)
    if output.exists() and output.samefile(file):
        refuse(f"{output} is the recording: give --output another name")
    title = escaped(file.name.removesuffix(".gz").removesuffix(".jsonl"))
    output.write_bytes(make_page(file, title))
    say(f"open {output} in a browser")
    return 0
