"""`nanopage models`, `show`, `pull`, `rm` and `cache clean`: models, and what else is in the caches."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from nanopage import escaped
from nanopage.terminal.chat import refuse
from nanopage.terminal.program import command
from nanopage.terminal.text import say

if TYPE_CHECKING:
    from nanopage.weights.inventory import Entry, StoredModel

MODEL = typer.Argument(metavar="MODEL", help="A name or an id that `nanopage models` shows.")
JSON = typer.Option("--json", help="The same as JSON, on stdout.")
YES = typer.Option("--yes", help="Do not ask.")
cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What nanopage can make again.")


@command
def models(as_json: Annotated[bool, JSON] = False) -> int:
    """List the models on this disk, by the names that --model takes, and what else is in the caches."""
    from nanopage.weights.inventory import describe, kept_files, stored_models

    found, kept = [(model, describe(model.directory)) for model in stored_models()], kept_files()
    if as_json:
        listed = [_fields(model) | asdict(description) for model, description in found]
        _print_json({"models": listed, "can_be_made_again": [*map(_fields, kept)]})
        return 0
    rows = [("NAME", "SIZE", "CONTEXT", "WEIGHTS", "TEMPLATE", "LAST USE")]
    for model, about in found:
        weights, context = about.quantization or about.dtype, _text(about.context)
        template = "yes" if about.chat_template else "-"
        rows.append((model.name, size(model.num_bytes), context, _text(weights), template, day(model)))
    _print_rows(rows)
    for kind in dict.fromkeys(entry.kind for entry in kept):
        total = sum(entry.num_bytes for entry in kept if entry.kind == kind)
        say(f"besides, {size(total)} of {kind}, which nanopage cache clean removes")
    return 0


@command
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that `nanopage models` shows, or a directory.")],
    as_json: Annotated[bool, JSON] = False,
) -> int:
    """Say what is known of a model on this disk, and whether nanopage has its family."""
    from nanopage.weights.inventory import StoredModel, describe, measure

    path = Path(model).expanduser()
    stored = StoredModel(path, *measure(path), model, model, path) if path.is_dir() else _find(model)
    fields = _fields(stored) | asdict(describe(stored.directory))
    if as_json:
        _print_json(fields)
        return 0
    shown = fields | {"num_bytes": size(stored.num_bytes), "last_used": day(stored)}
    _print_rows([(name.replace("_", " ").replace("num bytes", "size"), _text(shown[name])) for name in shown])
    return 0


@command
def pull(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="As for --model [default: its default].")] = None,
) -> int:
    """Download a model, or its newest version, without running it."""
    from nanopage.weights import hub

    if model is not None and Path(model).expanduser().exists():
        refuse(f"{model} is on this disk already")
    print(escaped(str(hub.resolve(model))))
    return 0


@command
def rm(names: Annotated[list[str], MODEL], yes: Annotated[bool, YES] = False) -> int:
    """Remove models from this disk. One that a process uses stays."""
    found = list({each.path: each for each in map(_find, names)}.values())
    return _remove(found, [each.name for each in found], yes)


@cache.command()
@command
def clean(yes: Annotated[bool, YES] = False) -> int:
    """Remove compiled code, repacked weights and what was left unfinished. What a process uses stays."""
    from nanopage.weights.inventory import kept_files

    found = kept_files()
    _remove(found, [each.kind for each in found], yes)
    return 0


def _remove(entries: Sequence["Entry"], kinds: list[str], yes: bool) -> int:
    """List what is to be removed, ask, and remove it. Returns 1 if something is left, else 0."""
    from nanopage.weights.inventory import is_used, remove, used_paths

    used = used_paths()
    free = [entry for entry in entries if not is_used(entry.path, used)]
    rows = [
        (kind, size(entry.num_bytes), day(entry), f"{entry.path}{'' if entry in free else '  in use: stays'}")
        for entry, kind in zip(entries, kinds, strict=True)
    ]
    _print_rows(rows)
    if not free:
        say("nothing to remove")
        return int(bool(entries))
    if not yes and not _agreed(f"Remove {len(free):,} of them, {size(sum(entry.num_bytes for entry in free))}?"):
        say("nothing was removed")
        return 1
    removed = [entry for entry in free if remove(entry.path)]
    say(f"removed {size(sum(entry.num_bytes for entry in removed))}")
    return int(len(removed) < len(entries))


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        refuse("stdin is not a terminal, so nobody can be asked: give --yes")
    return typer.confirm(question, err=True)


def _find(name: str) -> "StoredModel":
    """The model with this name or id. Raises: FileNotFoundError if there is none, or several."""
    from nanopage.weights.inventory import find_stored, full_id

    if (model := find_stored(name)) is not None:
        return model
    full_id(name)  # raises for a name of several
    raise FileNotFoundError(f"no model {name!r} in the caches: nanopage models lists them, nanopage pull downloads one")


def _fields(entry: "Entry") -> dict[str, Any]:
    """An entry of a cache for JSON."""
    used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.last_used))
    fields = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(entry).items()}
    return fields | {"last_used": used}


def size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def day(entry: "Entry") -> str:
    """The day of an entry's last use, here."""
    return time.strftime("%Y-%m-%d", time.localtime(entry.last_used))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    """Print cells in columns on stdout."""
    cells = [[escaped(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
