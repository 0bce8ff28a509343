"""How the commands of bench.py print."""

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.machine import machine_state, versions
from nanopage.terminal.text import printable

console = Console()


def plain(text: str) -> str:
    """Make text from outside safe for `console.print`: no control characters, and no rich markup."""
    return escape(printable(text))


@contextlib.contextmanager
def errors_by_name() -> Iterator[None]:
    """End the program with a message if the engine refuses something."""
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        console.print(f"[red]error:[/red] {plain(str(error))}", highlight=False)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def left_out_if_it_fails(name: str, failures: dict[str, str]) -> Iterator[None]:
    """If a peer fails, print the error, whatever it is, record it under the peer's name, and go on."""
    try:
        yield
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
        console.print(
            f"[red]{name} failed[/red] and is left out from here on: {plain(failures[name])}", highlight=False
        )


def show_header(header: dict[str, str]) -> None:
    for name, value in header.items():
        console.print(f"[dim]{name:>14}[/dim]  {plain(value)}", highlight=False, soft_wrap=True)


def table_of(title: str, columns: list[str]) -> Table:
    """A table without a frame, which takes little of a terminal's width."""
    title = "\n" + plain(title)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    return table


def show_table(table: Table) -> None:
    """Print a table. If it is too wide, wrap its cells between words; rich alone would break words."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    wanted = [max(map(len, cells)) for cells in columns]
    widths = [max(len(word) for word in " ".join(cells).split()) for cells in columns]
    gaps = len(columns) * (1 + table.padding[1])
    for _ in range(console.width - gaps - sum(widths)):
        missing = [want - width for want, width in zip(wanted, widths, strict=True)]
        if max(missing) > 0:
            widths[missing.index(max(missing))] += 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    console.print(table)


def figure(value: float | None) -> str:
    """A number with three significant digits, at most three decimals, and all digits before the point. Integers keep
    all their digits, and None is "-"."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(max(decimals, 0), 3)}f}"


def spread(values: Sequence[float | None]) -> str:
    """Median, lowest and highest, or one figure if all are equal; "-" if any is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    if min(known) == max(known):
        return figure(known[0])
    return f"{figure(statistics.median(known))} [{figure(min(known))}-{figure(max(known))}]"


def describe(engine: Any, what: str, compare: str | None = None) -> dict[str, str]:
    """What a reader must know to judge or repeat the figures."""
    import torch

    libraries = ["transformers"] if compare else []
    config = engine.config
    scheduling = "async scheduling" if engine.async_scheduling else "no async scheduling"
    weights = f", weights {config.quantization}" if config.quantization else ""
    weights += ", dummy weights" if config.load_format == "dummy" else ""
    hardware, gpu = machine_state(engine.capacity.device)
    scheduling += ", batch-invariant" if config.batch_invariant else ""
    libraries += ["triton"] if engine.capacity.device == "cuda" else []
    return {
        "bench": what,
        "model": f"{engine.model_path.name}, {engine.capacity.dtype}{weights}",
        "device": f"{engine.capacity.device}: {hardware}, {torch.get_num_threads()} threads",
        **gpu,
        "switches": f"{'eager' if config.enforce_eager else 'compiled'}, {scheduling}, block size {config.block_size}",
        "versions": versions(*libraries),
    }
