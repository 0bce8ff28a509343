"""What the contests share: they run the code of an exercise beside nanopage's, and print a table."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

COURSE = Path(__file__).parent.parent


def load(folder: str, name: str) -> ModuleType:
    """The module `folder`/`name`.py of the course."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", COURSE / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def main(name: str, run: Callable[[ModuleType], None]) -> None:
    """Run a contest with exercises/`name`.py, or with --solutions on the command line, with solutions/`name`.py."""
    if sys.argv[1:] not in ([], ["--solutions"]):
        sys.exit(f"{sys.argv[0]} takes no arguments but --solutions")
    try:
        run(load("solutions" if sys.argv[1:] else "exercises", name))
    except NotImplementedError:
        sys.exit(f"docs/course/exercises/{name}.py is not solved yet. To see our solution run, add --solutions")


def show(title: str, rows: dict[str, dict[str, float]], form: str, best: Callable = max) -> None:
    """Print a table with a line for each trace and a column for each competitor. A star marks the best of each line.

    Args: form: of a number, as for `format`.
    """
    names = list(next(iter(rows.values())))
    print(title + "\n\n" + " " * 22 + "".join(f"{name:>18}" for name in names))
    for trace, figures in rows.items():
        shown = [format(figures[name], form) for name in names]
        top = format(best(figures.values()), form)
        print(f"{trace:22}" + "".join(f"{each:>16} {'*' if each == top else ' '}" for each in shown).rstrip())
