"""Frames of an engine, and recordings of them. The fuzz suite compares what frames add up to with the whole state, in
random worlds (`check_picture`)."""

import gzip
import json
from pathlib import Path

import pytest
from fake_executor import add, fake_engine, tokens
from rich.console import Console

import nanopage.view.frames
from nanopage import BeamSearchParams
from nanopage.terminal.blocks import draw
from nanopage.view.export import RUNS
from nanopage.view.frames import MAX_ENDED, Frames, Recorder
from nanopage.view.picture import Picture, read_recording

PREFIX = list(range(10, 26))


def steps(engine, frames, picture, most=500):
    """The frames of all steps until nothing is left to do."""
    made = []
    while engine.has_unfinished_requests():
        engine.step()
        made.append(frames.step(engine.last_step))
        picture.apply(made[-1])
        assert len(made) < most
    return made


def start(engine):
    frames, picture = Frames(engine, "fake"), Picture()
    picture.apply(frames.key())
    return frames, picture


def test_a_request_in_frames():
    engine = fake_engine()
    frames, picture = start(engine)
    add(engine, "secret id", [*PREFIX, 1], tokens(3))
    first, second, last = steps(engine, frames, picture)
    assert first["requests"] == [[1, 17, 20, 1, False, 0, 18, 17, 0]]
    assert first["queues"] == [[], [1], []] and "queues" not in second and last["queues"] == [[], [], []]
    assert first["events"] == [["added", 1], ["started", 1]] and last["events"] == [["finished", 1]]
    assert [chunk[2:] for chunk in first["chunks"]] == [[0, 17]] and second["chunks"] == [] and second["size"] == 1
    assert second["progress"] == [(1, 19, 18, 0)]
    assert len(first["tables"][0][3]) == 3 and last["gone"] == [first["tables"][0][0]]
    assert last["cached"] == [0, 1] and picture.cached == {0, 1}  # the full blocks, once they are in no table
    assert [number for number, _, _ in first["batches"]] == [1]
    assert "secret" not in json.dumps([first, second, last]), "no id of a request, which a client may have chosen"


def test_prefix_hits_evictions_copies_and_swaps_are_shown():
    engine = fake_engine(12, 12, preemption_mode="swap")
    frames, picture = start(engine)
    for i in range(4):
        add(engine, str(i), [*PREFIX, *[30 + i] * (3 + 4 * i)], tokens(30))
    add(engine, "n", [*PREFIX, 1], tokens(12, n=2, temperature=1))
    made = [frame for frame in steps(engine, frames, picture) if frame["frame"] == "step"]
    for name in ("hits", "evicted", "copies", "host", "host_gone", "cached", "uncached", "gone"):
        assert any(frame.get(name) for frame in made), name
    assert any(frame["swaps"][0] for frame in made) and any(frame["swaps"][1] for frame in made)
    assert picture.requests == {} and picture.tables == {} and picture.host == {}
    assert picture.preempted and picture.output_tokens == 4 * 30 + 2 * 12


def test_two_batches_in_flight_have_times_that_overlap():
    engine = fake_engine(async_scheduling=True)
    frames, picture = start(engine)
    add(engine, "a", PREFIX, tokens(5))
    times = {}
    for frame in steps(engine, frames, picture):
        times |= {number: (begin, end) for number, begin, end in frame["batches"]}
    assert [*times] == [1, 2, 3, 4, 5]
    assert all(times[number + 1][0] < times[number][1] for number in range(1, 5))


def test_what_step_frames_cannot_tell_becomes_a_key_frame():
    engine = fake_engine()
    frames, picture = start(engine)
    add(engine, "a", PREFIX, tokens(2))
    steps(engine, frames, picture)
    assert picture.cached
    engine.reset_prefix_cache()
    add(engine, "b", [1], tokens(1))
    (frame,) = steps(engine, frames, picture)
    assert frame["frame"] == "key" and picture.cached == set()


def test_nothing_is_said_of_requests_that_ended_before_the_first_frame():
    engine = fake_engine()
    add(engine, "before", PREFIX, tokens(1))
    add(engine, "beside", [1], tokens(3))
    engine.step()
    frame = Frames(engine, "fake").key()
    assert len(frame["requests"]) == 1
    assert [sentence[:2] for sentence in frame["why"]] == [["add", 1], ["admit", 1], ["run", None]]


def test_ids_that_come_again_have_new_numbers_and_old_ones_are_forgotten():
    engine = fake_engine()
    frames, picture = start(engine)
    for _ in range(2 * MAX_ENDED + 10):
        add(engine, "again", [1], tokens(1))
        add(engine, "once", [1], tokens(1))
        made = steps(engine, frames, picture)
    assert made[-1]["events"][-1] == ["finished", 4 * MAX_ENDED + 20]
    assert len(frames._numbers) < 3 * MAX_ENDED


def test_a_request_that_is_aborted_and_added_anew_between_two_steps():
    engine = fake_engine()
    frames, picture = start(engine)
    add(engine, "a", [1] * 9)
    engine.step()
    picture.apply(frames.step(engine.last_step))
    engine.abort("a")
    add(engine, "a", [2] * 5, tokens(1))
    (frame,) = steps(engine, frames, picture)
    assert frame["events"] == [["finished", 1], ["added", 2], ["started", 2], ["finished", 2]]


@pytest.mark.parametrize("windows", [(None, 20), (20,)])
def test_with_windows_a_step_reads_only_tables_that_have_changed(monkeypatch, windows):
    engine, read, held = fake_engine(400, windows=windows), [], nanopage.view.frames._held
    frames, picture = start(engine)
    for i in range(8):
        add(engine, str(i), [10 + i] * (33 + i), tokens(40))
    for _ in range(4):
        engine.step()
        picture.apply(frames.step(engine.last_step))
    monkeypatch.setattr(nanopage.view.frames, "_held", lambda table: read.append(len(table)) or held(table))
    for _ in range(16):
        engine.step()
        picture.apply(frames.step(engine.last_step))
    assert len(engine.scheduler.running) == 8 and picture.last["frame"] == "step"
    assert sum(map(bool, read)) == 8 * 16 / 8 * 2  # as they get a block, and as they give one back
    whole = Picture()
    whole.apply(Frames(engine, "fake").key())
    assert [blocks for _, blocks in picture.tables.values()] == [blocks for _, blocks in whole.tables.values()]


# Recordings


def test_a_recording_is_read_back_as_it_was(tmp_path):
    engine = fake_engine()
    for name in ("run.jsonl", "run.jsonl.gz"):
        opened = gzip.open if name.endswith("gz") else open
        with opened(tmp_path / name, "wb") as file:
            engine.listeners[:] = [Recorder(engine, file, "fake")]
            add(engine, "a", PREFIX, tokens(3))
            while engine.has_unfinished_requests():
                engine.step()
        kinds = [frame["frame"] for frame in read_recording(tmp_path / name)]
        assert kinds == ["key", "step", "step", "step"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"frame": "step"}', '{"frame": "key", "version": 9}'])
def test_what_is_no_recording_is_refused(tmp_path, text):
    file = tmp_path / "run.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match=r"run.jsonl, line 1: "):
        list(read_recording(file))


@pytest.mark.parametrize("name", ["continuous-batching", "prefix-sharing", "preemption", "beams"])
def test_the_recordings_of_the_repository_show_what_they_are_about(name):
    file = RUNS / f"{name}.jsonl.gz"
    assert file.stat().st_size < 60_000
    picture, events, kinds, last = Picture(), set(), set(), 0.0
    for frame in read_recording(file):
        assert frame["time"] >= last
        last = frame["time"]
        picture.apply(frame)
        assert len(picture.owners()) + len(picture.cached) <= picture.key["num_blocks"]
        assert not picture.cached & picture.owners().keys()
        events |= {kind for kind, _ in frame.get("events", ())}
        kinds |= {kind for kind, _, _ in frame["why"]}
    assert picture.queues == [[], [], []] and picture.tables == {}
    expected = {
        "continuous-batching": {"wait", "admit"},
        "prefix-sharing": {"wait"},
        "preemption": {"preempt", "swap out", "swap in"},
        "beams": {"fork", "drop", "copy"},
    }
    assert expected[name] <= kinds
    assert name != "prefix-sharing" or picture.hit_tokens > picture.prompt_tokens / 3


# In the terminal


def drawn(picture, width=80, height=24) -> list[str]:
    console = Console(width=width, no_color=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw(picture, width, height))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_terminal_shows_requests_and_blocks_without_colour():
    engine = fake_engine(12, 12, preemption_mode="swap")
    frames, picture = start(engine)
    assert drawn(picture)[1:4] == ["no request", "12 blocks of 8 tokens: 0 used, 0 cached, 12 free", " ·" + "  ·" * 11]
    for i in range(2):
        add(engine, str(i), [*PREFIX, 30 + i], tokens(20))
    for _ in range(3):
        engine.step()
        picture.apply(frames.step(engine.last_step))
    lines = drawn(picture)
    assert lines[0] == "step 3  2 running  0 waiting  0 swapped  0 preempted  47% prefix hits"
    assert lines[1].split()[:2] == ["1", "decode"] and lines[1].split()[3:] == ["17", "+", "3", "3", "blocks"]
    assert "×2 ×2  1  2  ·  ·  ·  ·  ·  ·  ·  ·" in [line.strip() for line in lines]
    assert lines[-1] == "- The step runs 2 decodes: 2 of at most 2048 tokens."


@pytest.mark.parametrize(("width", "height"), [(40, 12), (80, 24), (200, 50)])
@pytest.mark.parametrize("num_blocks", [14, 500, 100_000])
def test_it_fits_the_terminal(width, height, num_blocks):
    engine = fake_engine(num_blocks)
    frames, picture = start(engine)
    for i in range(60):
        add(engine, str(i), [*PREFIX, i], BeamSearchParams(beam_width=2, max_tokens=4) if i % 3 == 0 else tokens(9))
    for _ in range(4):
        engine.step()
        picture.apply(frames.step(engine.last_step))
    lines = drawn(picture, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width


def test_the_view_needs_no_torch():
    import subprocess
    import sys

    script = "import sys; sys.modules['torch'] = None; import nanopage.view.frames"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True)
