"""Regenerates docs/build/mini/: mini_ref/ without the bodies of the functions that the milestones ask for.

    python docs/build/empty.py

It overwrites what you have written there. tests/test_build.py checks that mini/ is what this makes.
"""

import ast
from pathlib import Path

BUILD = Path(__file__).parent
MILESTONES = {  # function -> the milestone that asks for it first; all others are given
    "attention.py": {"attend_one": 1, "attend": 2, "paged_attention": 5},
    "model.py": {"__init__": 2, "forward": 2, "logits": 2, "linear": 2, "norm": 2, "rotate": 2},
    "generate.py": {"generate": 3, "__init__": 4, "attend": 4},
    "blocks.py": {
        **dict.fromkeys(("num_free", "blocks_for", "slots", "grow", "free", "take", "drop"), 5),
        **dict.fromkeys(("share", "hashes", "find_prefix", "store_prefix"), 8),
    },
    "cache.py": {"prepare": 5, "attend": 5},
    "scheduler.py": {"schedule": 6, "admit": 6, "preempt": 6, "finish": 6, "fork": 9},
    "engine.py": {
        **dict.fromkeys(("add_request", "has_unfinished", "abort", "step", "compute", "update"), 6),
        "capture": 11,
    },
    "sampling.py": {"sample": 9},
    "kernel.py": {"attention_kernel": 10},
    "graphs.py": {"capture_sizes": 11, "padding": 11, "__init__": 11, "fits": 11, "run": 11},
    "server.py": {"run": 12, "add": 12, "stream": 12, "make_app": 12},
}


def emptied(file: Path) -> str:
    """The text of a file of mini_ref/ with its functions emptied: they keep their docstrings and raise an error."""
    lines = file.read_text().splitlines()
    functions = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in sorted(functions, key=lambda node: node.lineno, reverse=True):
        milestone = MILESTONES.get(file.name, {}).get(node.name)
        if milestone is not None:
            first = node.body[0]
            keep = first.end_lineno if ast.get_docstring(node) else first.lineno - 1
            lines[keep : node.end_lineno] = [
                " " * first.col_offset + f'raise NotImplementedError("milestone {milestone}")'
            ]
    return "\n".join(lines).replace("mini_ref", "mini") + "\n"


if __name__ == "__main__":
    (BUILD / "mini").mkdir(exist_ok=True)
    for file in (BUILD / "mini_ref").glob("*.py"):
        (BUILD / "mini" / file.name).write_text(emptied(file))
