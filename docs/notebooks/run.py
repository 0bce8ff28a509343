"""Runs the notebooks without Jupyter, and keeps in each what it prints and draws.

python docs/notebooks/run.py

tests/view/test_notebooks.py runs them, too, and compares.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent


class Shown:
    """What `display` returns: an output whose drawing can be replaced."""

    def __init__(self, svg: str):
        self.svg = svg

    def update(self, svg: str) -> None:
        self.svg = svg


def run(notebook: dict[str, Any]) -> None:
    """Run the code cells of a notebook in one namespace, and set their outputs."""
    shown: list[Shown] = []

    def display(svg: str, display_id: bool) -> Shown:
        shown.append(Shown(svg))
        return shown[-1]

    stand_in: Any = ModuleType("IPython.display")
    stand_in.SVG, stand_in.display = str, display
    sys.modules["IPython.display"] = stand_in
    sys.path.insert(0, str(FOLDER))  # as in Jupyter
    try:
        import drawing

        drawing.PAUSE = 0
        names: dict[str, Any] = {}
        for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
            shown.clear()
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"code cell {number}", "exec"), names)
            cell["execution_count"], cell["outputs"] = number, []
            if printed.getvalue():
                text = printed.getvalue().splitlines(keepends=True)
                cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text})
            for each in shown:
                data = {"image/svg+xml": each.svg.splitlines(keepends=True)}
                cell["outputs"].append({"data": data, "metadata": {}, "output_type": "display_data"})
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("drawing", "IPython.display"):
            sys.modules.pop(name, None)


def main() -> None:
    for file in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(file.read_text())
        with contextlib.chdir(FOLDER):  # a notebook writes files
            run(notebook)
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
