"""Runs worlds on an engine until one of them shows that it is wrong."""

import importlib
import importlib.util
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import ModuleType

from nanopage.grading.play import Answers, Failure, Run, name, play
from nanopage.grading.reference import Reference
from nanopage.grading.story import tell
from nanopage.grading.worlds import AMPLE, MAX_TOKENS, Request, World, draw_world, shrink

INTERRUPTED = "KeyboardInterrupt"  # begins what is wrong if Ctrl-C ended a run


def load(directory: Path) -> ModuleType:
    """Import a package and its module `engine` from a directory, under a name of its own."""
    if not (directory / "engine.py").is_file() or not (directory / "__init__.py").is_file():
        raise ValueError(f"{directory}: not a package with an engine: __init__.py or engine.py is missing")
    package, paths = f"graded_{len(sys.modules)}", [str(directory.resolve())]
    spec = importlib.util.spec_from_file_location(
        package, directory.resolve() / "__init__.py", submodule_search_locations=paths
    )
    assert spec is not None and spec.loader is not None
    sys.modules[package] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    importlib.import_module(f"{package}.engine")
    return module


class Grader:
    """Checks worlds of one package."""

    def __init__(self, package: ModuleType, reference: Reference):
        self.package, self.reference = package, reference
        self.alone: dict[Request, Run] = {}

    def check(self, world: World) -> Run:
        """Run a world. If one of its requests goes wrong alone, the run is that of this request."""
        greedy = self.reference.greedy([request.prompt_ids for request in world.requests])
        expected: Answers = {}
        for request, tokens in zip(world.requests, greedy, strict=True):
            whole = replace(request, stop_ids=(), arrival=0, abort_at=None, max_tokens=MAX_TOKENS)
            if request.temperature and (run := self.run_alone(whole, tokens)).failure:
                return run
            for index in range(request.n):
                answer = run.tokens[request.request_id, index] if request.temperature else tokens
                ends = [place for place, token in enumerate(answer, 1) if token in request.stop_ids]
                expected[request.request_id, index] = [*answer[: min([request.max_tokens, *ends])]]
        return play(self.package, self.reference.model_dir, world, expected)

    def run_alone(self, request: Request, greedy: list[int]) -> Run:
        """Run a request in a new engine with ample blocks of one token: no answer then writes to a block of another.
        Before that, run it greedily, since an engine that fails there cannot sample."""
        if request not in self.alone:
            simple = World((replace(request, temperature=0.0, n=1),), AMPLE)
            run = play(self.package, self.reference.model_dir, simple, {(request.request_id, 0): [*greedy]})
            if not run.failure:
                any_tokens: Answers = {(request.request_id, index): [None] * MAX_TOKENS for index in range(request.n)}
                run = play(self.package, self.reference.model_dir, World((request,), AMPLE), any_tokens)
            for one, other in combinations(run.tokens, 2):
                if not run.failure and request.temperature > 1 and run.tokens[one] == run.tokens[other]:
                    what = f"{name(one)} and {name(other)} have the same tokens at temperature {request.temperature}."
                    cause = "The answers of a request share their noise. It must depend on their index, too."
                    run.failure = Failure(run.steps[-1].number, what, cause)
            self.alone[request] = run
        return self.alone[request]


def grade(directory: Path, worlds: int, seed: int, reference: Reference) -> str | None:
    """Run the worlds `seed`, `seed` + 1, ... Returns: the story of the first that fails, or None."""
    grader = Grader(load(directory), reference)
    for number in range(seed, seed + worlds):
        run = grader.check(draw_world(number))
        if run.failure:
            if run.failure.what.startswith(INTERRUPTED):
                return f"World {number} was interrupted:\n\n{tell(run)}"
            cause = run.failure.cause

            def fails(world: World, cause: str = cause) -> bool:
                failure = grader.check(world).failure
                if failure is not None and failure.what.startswith(INTERRUPTED):
                    raise KeyboardInterrupt
                return failure is not None and failure.cause == cause

            run = grader.check(shrink(run.world, fails))
            return f"World {number} fails. Made smaller, it still fails:\n\n{tell(run)}"
    return None
