"""Recordings as HTML files, and the labs. tests/server/test_view_page.py opens one in a browser."""

import base64
import gzip
import json
import re
import runpy
from pathlib import Path

import pytest
from typer.main import get_command

from nanopage.__main__ import app
from nanopage.view.export import PAGE, find_recording, make_page, shipped_recordings
from nanopage.view.picture import read_recording

LABS = Path(__file__).parents[2] / "docs" / "labs"
KEY = next(read_recording(find_recording("beams")))


def contents(page: bytes) -> dict:
    """What a page has in its element `recording`, with the frames in place of the packed recording."""
    (data,) = re.findall(rb'<script id="recording" type="application/json">(.*?)</script>', page, re.DOTALL)
    given = json.loads(data)
    lines = gzip.decompress(base64.b64decode(given["recording"])).splitlines()
    return given | {"recording": [json.loads(line) for line in lines]}


def test_a_file_is_the_page_with_the_recording(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, file in shipped_recordings().items():
        with pytest.raises(SystemExit, match="0"):
            get_command(app).main(["view", "export", name, "-o", "lab.html"], "nanopage")
        page = Path("lab.html").read_bytes()
        assert contents(page) == {"recording": [*read_recording(file)], "title": name, "questions": []}
        assert "lab.html" in capsys.readouterr().err
    rest = re.sub(rb'<meta http-equiv="content-security-policy" .*\n|<script id="recording".*\n', b"", page)
    assert rest == PAGE.read_bytes()
    assert b"content=\"default-src 'none'; script-src 'sha256-" in page and b"connect-src" not in page


def test_no_text_ends_the_element_that_it_is_in():
    text = "</script><script>alert(1)</script><!--"
    page = make_page(find_recording("beams"), text, [(text, text)])
    assert contents(page)["questions"] == [[text, text]] and b"alert(1)</script>" not in page


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("run.jsonl", b"", "run.jsonl is empty"),
        ("run.jsonl", json.dumps(KEY).encode() + b"\n{", "run.jsonl, line 2: "),
        ("run.jsonl", json.dumps(KEY | {"tables": 1}).encode(), "run.jsonl, line 1: TypeError"),
        ("run.jsonl", json.dumps({"frame": "key", "version": 1}).encode(), "run.jsonl, line 1: KeyError"),
        ("run.jsonl.gz", b"{}", "run.jsonl.gz, line 1: BadGzipFile"),
        ("run.jsonl.gz", gzip.compress(json.dumps(KEY).encode() * 9)[:-9], "run.jsonl.gz, line 1: EOFError"),
        ("run.jsonl", None, "no file run.jsonl, and no recording of this name: there are beams, "),
    ],
)
def test_what_is_no_recording_is_refused_by_its_name(name, data, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if data is not None:
        Path(name).write_bytes(data)
    with pytest.raises(SystemExit, match="1"):
        get_command(app).main(["view", "export", name, "-o", "lab.html"], "nanopage")
    assert message in capsys.readouterr().err.replace("\n", " ") and not Path("lab.html").exists()


def test_a_recording_is_not_overwritten(tmp_path, capsys):
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps(KEY))
    with pytest.raises(SystemExit, match="2"):
        get_command(app).main(["view", "export", str(file), "-o", str(file)], "nanopage")
    assert file.read_text() == json.dumps(KEY)


def test_a_recording_that_no_page_would_read_is_refused(monkeypatch):
    monkeypatch.setattr("nanopage.view.export.MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"beams\.jsonl\.gz has more than "):
        make_page(find_recording("beams"), "beams")


def test_the_labs_become_pages_and_their_answers_are_what_the_recordings_say(tmp_path):
    make = runpy.run_path(str(LABS / "make.py"))
    labs = make["read_labs"]()
    make["main"](tmp_path)
    assert len(labs) == len(re.findall(r"^## \d", (LABS / "README.md").read_text(), re.MULTILINE)) == 5
    for number, (title, recording, questions) in enumerate(labs, 1):
        given = contents((tmp_path / f"{number}.html").read_bytes())
        assert given["title"] == title and given["questions"] == [[*each] for each in questions] != []
        told: dict[int, str] = {}
        for frame in read_recording(find_recording(recording)):
            if frame["frame"] == "step":
                told.setdefault(frame["step"], " ".join(text for _, _, text in frame["why"]))
        for _, answer in questions:
            quotations = re.split(r"step (\d+):", answer, flags=re.IGNORECASE)[1:]
            assert quotations, "an answer quotes the recording"
            for step, text in zip(quotations[::2], quotations[1::2], strict=True):
                for sentence in re.findall(r'"([^"]+)"', text):
                    assert sentence in told[int(step)], f"{title}: step {step}"
