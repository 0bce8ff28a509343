"""The tests import `built`: docs/build/mini, or the package that the variable MINI names (MINI=mini_ref).

With `-k m1`, only the tests of milestone 1 are read, and not those of milestones 10, 11 and 12 as well.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels then run on the CPU
sys.path.insert(0, str(BUILD.parents[1] / "tests"))  # helpers.py makes tiny models


def pytest_configure(config):
    folder = BUILD / os.environ.get("MINI", "mini")
    if not (folder / "__init__.py").exists():
        raise pytest.UsageError(f"MINI={os.environ['MINI']}: there is no such package in {BUILD}")
    spec = importlib.util.spec_from_file_location(
        "built", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["built"] = importlib.util.module_from_spec(spec)


def pytest_ignore_collect(collection_path, config):
    wanted = re.findall(r"\bm\d+\b", config.option.keyword)
    milestone = re.match(r"test_(m\d+)_", collection_path.name)
    return True if wanted and milestone and milestone[1] not in wanted else None


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny Llama with random weights in float64, so that no order of additions changes a token."""
    from helpers import tiny_model  # takes seconds to import

    return tiny_model(tmp_path_factory.mktemp("model"), dtype="float64")


@pytest.fixture
def model(model_dir):
    from built.model import Model

    return Model(model_dir)


@pytest.fixture
def prompts():
    """Random prompts of these lengths."""
    from helpers import random_tokens

    return random_tokens


@pytest.fixture
def end_preemptions():
    """Makes it an error if a scheduler preempts without end."""

    def end_preemptions(scheduler, most=500):
        calls, preempt = [], scheduler.preempt

        def counted(seq):
            calls.append(seq)
            assert len(calls) <= most, f"{seq.request_id} is preempted again and again: is it still in `running`?"
            preempt(seq)

        scheduler.preempt = counted

    return end_preemptions


@pytest.fixture
def start(model_dir, end_preemptions):
    """Makes an engine. Large numbers, so that a test says what it limits."""
    from built.engine import Engine

    large = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 50, "max_num_batched_tokens": 1000}

    def start(**limits):
        engine = Engine(model_dir, **large | limits)
        compute = engine.compute

        def checked(batch):
            strangers = [seq.request_id for seq, _ in batch if seq not in engine.scheduler.running]
            assert not strangers, f"{strangers} are in the step and not in `running`: preempted, and not taken out?"
            assert engine.running is engine.scheduler.running, "`running` must stay the same list: change it in place"
            return compute(batch)

        engine.compute = checked
        end_preemptions(engine.scheduler)
        return engine

    return start


@pytest.fixture
def watch_sizes():
    """Watches a model. Returns: a list that grows by the number of tokens of each forward pass."""

    def watch_sizes(model):
        sizes, forward = [], model.forward

        def watched(token_ids, *args, **options):
            sizes.append(len(token_ids))
            return forward(token_ids, *args, **options)

        model.forward = watched
        return sizes

    return watch_sizes


@pytest.fixture
def run():
    """Runs an engine until it has nothing left to do. Returns: all new tokens of each (request_id, index)."""

    def run(engine, tokens=None):
        tokens = {} if tokens is None else tokens
        for _ in range(1000):
            if not engine.has_unfinished():
                assert engine.blocks.num_free == engine.blocks.num_blocks, "blocks are lost"
                return tokens
            for key, new in engine.step().items():
                tokens.setdefault(key, []).extend(new)
            check(engine)
        raise AssertionError("the engine does not come to an end")

    return run


def check(engine):
    """What holds after each step: every block in a table is counted, and no table is longer than it needs to be."""
    assert engine.running is engine.scheduler.running, "`running` must stay the same list: change it in place"
    tables = [block for seq in engine.running for block in seq.block_table]
    counts = {block: tables.count(block) for block in tables}
    assert engine.blocks.ref_counts == counts, "ref_counts are not those of the tables of `running`"
    assert engine.blocks.num_free + len(set(tables)) == engine.blocks.num_blocks, "blocks are lost"
