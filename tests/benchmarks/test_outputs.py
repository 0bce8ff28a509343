"""benchmarks/outputs.py: files that cannot be written are refused, and no failure or signal loses what was measured."""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
import typer

from benchmarks import outputs
from benchmarks.outputs import Stopped, check_outputs, check_plot, recorded, stopped_by_signals, write
from benchmarks.report import console


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(console, "width", 300)


@pytest.fixture
def handlers():
    """Puts back pytest's own handlers of signals."""
    before = {number: signal.getsignal(number) for number in outputs.SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def kept_file(printed):
    return Path(printed.split("kept in ")[1].split()[0])


@pytest.mark.parametrize("option", ["--json", "--profile", "--plot"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("folder", "Is a directory"),
        ("no/such/folder.json", "no such folder: .*/no/such"),
        ("file/x.json", "no such folder: .*/file"),
        ("n" * 300, "File name too long"),
        ("fifo", "not a regular file"),
        ("loop", "Too many levels of symbolic links"),
        ("/sys/x.json", "Permission denied|Read-only file system"),
        ("", "Is a directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path, monkeypatch, option, name, says):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    with pytest.raises(typer.BadParameter, match=says) as refusal:
        check_outputs({option: Path(name)})
    assert refusal.value.param_hint == option


def test_a_check_changes_nothing(tmp_path):
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("old")
    os.utime(old, (5, 5))
    link.symlink_to(tmp_path / "target.json")
    check_outputs({"--json": old, "--profile": link, "--plot": tmp_path / "new.png"})
    assert sorted(os.listdir(tmp_path)) == ["link.json", "old.json"] and link.is_symlink()
    assert old.read_text() == "old" and old.stat().st_mtime == 5


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"--json": "a", "--plot": "b/../a"}, {}),
        ({"--json": "link"}, {"--trace": "a"}),
        ({"--json": "a"}, {"--trace": "a"}),
    ],
)
def test_a_file_that_two_options_name_is_refused(tmp_path, monkeypatch, written, read):
    monkeypatch.chdir(tmp_path)
    Path("b").mkdir()
    os.symlink("a", "link")
    files = ({option: Path(name) for option, name in names.items()} for names in (written, read))
    with pytest.raises(typer.BadParameter, match="name the same file") as refusal:
        check_outputs(*files)
    assert all(option in str(refusal.value) for option in written | read)


@pytest.mark.parametrize("name", ["x.docx", "x", "x.pgf"])
def test_pictures_are_of_the_kinds_that_help_names(name):
    with pytest.raises(typer.BadParameter, match=r"does not end in one of: \.png, \.svg, \.pdf"):
        check_plot(Path(name))


def test_what_cannot_be_written_is_kept_in_a_temporary_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = tmp_path / "full.json"
    full.symlink_to("/dev/full")
    check_outputs({"--json": full})
    assert not write(full, b"12 tok/s")
    printed = capsys.readouterr().out
    assert f"error: cannot write {full}: No space left on device" in printed
    assert kept_file(printed).parent == tmp_path and kept_file(printed).read_text() == "12 tok/s"


@pytest.mark.parametrize(("name", "shown"), [("full.json", True), ("full.png", False)])
def test_without_a_temporary_file_text_is_printed(tmp_path, monkeypatch, capsys, name, shown):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
    (tmp_path / name).symlink_to("/dev/full")
    assert not write(tmp_path / name, b"12 tok/s")
    printed = capsys.readouterr().out
    assert ("12 tok/s" in printed) == shown and "no temporary file either: No such file" in printed


def test_a_file_that_is_written_is_said(tmp_path, capsys):
    assert write(tmp_path / "x\x1b[2J[red].json", b"12 tok/s")
    assert f"wrote {tmp_path}/x\ufffd[2J[red].json" in capsys.readouterr().out
    assert (tmp_path / "x\x1b[2J[red].json").read_text() == "12 tok/s"


@pytest.mark.parametrize("error", [None, Stopped(signal.SIGTERM), ValueError(), BrokenPipeError()])
def test_results_are_written_however_the_block_ends(tmp_path, error):
    results = {"runs": [1]}
    try:
        with recorded(tmp_path / "x.json", lambda: results) as record:
            results["runs"].append(2)
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    assert json.loads((tmp_path / "x.json").read_text()) == {"complete": error is None, "runs": [1, 2]}
    assert record.complete == (error is None) and record.written


def test_a_signal_counts_even_if_the_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Stopped), recorded(Path("/dev/full"), lambda: {"runs": [1]}):
        raise Stopped(signal.SIGINT)
    assert json.loads(kept_file(capsys.readouterr().out).read_text()) == {"complete": False, "runs": [1]}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_raises_and_later_ones_do_not_disturb_the_writing(handlers, capsys, number, code):
    for each in outputs.SIGNALS:
        signal.signal(each, signal.default_int_handler)
    with pytest.raises(Stopped) as stopped, stopped_by_signals():
        try:
            os.kill(os.getpid(), number)
        finally:
            for each in outputs.SIGNALS:
                os.kill(os.getpid(), each)
    assert stopped.value.code == code
    assert f"stopped by {number.name}" in capsys.readouterr().err
    assert all(signal.getsignal(each) is signal.default_int_handler for each in outputs.SIGNALS)


def test_a_signal_that_is_ignored_stays_ignored(handlers):
    """nohup ignores SIGHUP, a shell without job control SIGINT of what runs in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stopped_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
