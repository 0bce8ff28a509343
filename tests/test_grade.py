"""`nanopage grade`: bugs planted in copies of the build-up track's reference are found, and their causes told."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanopage.__main__ import app
from nanopage.grading.grade import Reference, grade

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "build" / "mini_ref"
BUGS = {  # name: (first world, what the story says of the cause, file, text, its replacement, ...)
    "slots are off by one": (
        *(0, "belong in slot block * block_size + position % block_size"),
        *("blocks.py", "* size + position % size for", "* size + (position + 1) % size for"),
    ),
    "an evicted block keeps its name": (
        *(7, "block that is evicted must lose its name"),
        *("blocks.py", "self.block_of[self.hash_of.pop(block)]", "self.hash_of[block]"),
    ),
    "a shared block is written to": (
        *(5, "A shared block must be copied before it is written to"),
        *("blocks.py", "self.ref_counts[table[first]] > 1", "False"),
    ),
    "copies are not made": (
        *(12, "Its K and V must be copied there before the step is computed"),
        *("engine.py", "self.cache.kv[:, :, target] = self.cache.kv[:, :, source]", "pass"),
    ),
    "noise depends on the batch": (
        *(0, "Noise depends on what ran beside the request"),
        *("engine.py", "generator_for(each.seed,", "generator_for(each.seed + len(batch),"),
    ),
    "a block is freed twice": (
        *(0, "A block was freed twice"),
        *("blocks.py", "self.free_blocks.append(block)", "self.free_blocks += [block, block]"),
    ),
    "a chunk skips a token": (
        *(0, "A step must go on where the last one ended"),
        *("engine.py", "continue  # its", "seq.num_computed += seq.num_computed < len(seq.token_ids) - 1; continue #"),
    ),
    "a preempted sequence keeps num_computed": (
        *(8, "Preemption must set num_computed to 0"),
        *("scheduler.py", "        seq.num_computed = 0\n", ""),
        *("blocks.py", "list(blocks), num_tokens\n", "list(blocks), max(num_tokens, seq.num_computed)\n"),
    ),
    "hashes do not contain the tokens before": (
        *(0, "The hash of a block must contain all tokens before it"),
        *("blocks.py", "sha256(key + repr(", "sha256(repr("),
    ),
    "a stop id is ignored as the first token": (
        *(5, "A stop id must end an answer, also as its first token"),
        *("blocks.py", "in self.output[-1:])", "in self.output[1:][-1:])"),
    ),
    "answers share a seed": (
        *(3, "share their noise. It must depend on their index"),
        *("engine.py", "generator_for(each.seed, each.index,", "generator_for(each.seed, 0,"),
    ),
    "tokens see other sequences": (
        *(0, "A token must see its own sequence and no other"),
        *("attention.py", "(places // room == rows[:, None])", "(places // room <= rows[:, None])"),
    ),
    "steps do nothing": (
        *(0, "A sequence never ends, or one that waits is never admitted"),
        *("engine.py", "batch = self.scheduler.schedule()", "batch = []"),
    ),
    "a function is missing": (
        *(0, ': raise NotImplementedError("milestone 6")'),
        *(
            "scheduler.py",
            "        batch: list[tuple[Sequence, int]] = []\n",
            '        raise NotImplementedError("milestone 6")\n',
        ),
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("graded"))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_its_cause_told(bug, tmp_path, reference):
    first, cause, *patches = BUGS[bug]
    mini = shutil.copytree(REFERENCE, tmp_path / "mini", ignore=shutil.ignore_patterns("__pycache__"))
    for file, text, replacement in zip(*(patches[start::3] for start in range(3)), strict=True):
        source = (mini / file).read_text()
        assert source.count(text) == 1, text
        (mini / file).write_text(source.replace(text, replacement))
    story = grade(mini, 3, first, reference)
    assert story is not None and cause in story.partition("Likely cause: ")[2], story


def test_ctrl_c_in_a_loop_without_end_shows_its_line(tmp_path, reference):
    mini = shutil.copytree(REFERENCE, tmp_path / "mini")
    source = (mini / "engine.py").read_text()
    (mini / "engine.py").write_text(source.replace("batch = self", "raise KeyboardInterrupt; batch = self"))
    story = grade(mini, 1, 0, reference)
    assert story.startswith("World 0 was interrupted:") and "step in engine.py, line" in story.splitlines()[-1]


def test_an_engine_without_bugs_passes(reference):
    assert grade(REFERENCE, 6, 0, reference) is None


def test_the_command_tells_the_story(tmp_path, reference, monkeypatch):
    monkeypatch.setattr("nanopage.grading.grade.Reference", lambda directory: reference)
    runner, mini = CliRunner(), shutil.copytree(REFERENCE, tmp_path / "mini")
    done = runner.invoke(app, ["grade", str(mini), "--worlds", "1", "--seed", "5"])
    assert done.exit_code == 0 and done.stdout == "Worlds 5 to 5: no difference.\n", done.output
    source = (mini / "blocks.py").read_text()
    (mini / "blocks.py").write_text(source.replace("self.ref_counts[table[first]] > 1", "False"))
    done = runner.invoke(app, ["grade", str(mini), "--worlds", "1", "--seed", "5"])
    assert done.exit_code == 1 and done.stdout.splitlines()[0] == "World 5 fails. Made smaller, it still fails:"
    assert "in step 1: token 2 of b[0] is" in done.stdout and "block 0:\n    step 0: b[0] got it\n" in done.stdout
    done = runner.invoke(app, ["grade", str(tmp_path)])
    assert done.exit_code == 1 and "engine.py is missing" in done.stderr and not done.stdout
