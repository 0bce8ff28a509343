"""A model's files: what is not a file, not text or not JSON is an error that names it, and nothing blocks."""

import json
import logging
import os
import signal

import pytest

from nanopage import escaped
from nanopage.files import model_files
from nanopage.files.model_files import check_file, read_json, read_text, shown


@pytest.fixture(autouse=True)
def _nothing_blocks():
    """Opening a FIFO that nobody writes to would wait forever."""
    signal.alarm(60)
    yield
    signal.alarm(0)


NOT_FILES = {
    "a directory": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a FIFO": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo")),
}


@pytest.mark.parametrize("kind", NOT_FILES)
@pytest.mark.parametrize("read", [check_file, read_text, read_json])
def test_what_is_no_file_is_refused_by_name(tmp_path, kind, read):
    path = tmp_path / "config.json"
    NOT_FILES[kind](path)
    with pytest.raises(ValueError, match="is not a regular file") as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("read", [check_file, read_text, read_json])
def test_a_missing_file_is_named(tmp_path, read):
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("missing", "link"):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / name)):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["loop", "x" * 300, "file/config.json", "nul\0"])
@pytest.mark.parametrize("read", [check_file, read_text, read_json])
def test_a_path_that_cannot_be_followed_is_named(tmp_path, name, read):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be read") as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose reading fails")
def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match="cannot be read") as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to("blob")
    assert read_json(tmp_path / "config.json") == {"a": 1}


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "MAX_TEXT", 2**20)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": "x" * (2**20 - 9)}))
    assert path.stat().st_size == 2**20
    read_json(path)
    path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match="is larger than 1 MiB") as caught:
        read_json(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 1}}', "not valid JSON"),
        (b'{"a": "\xff"}', "is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),  # more digits than Python reads
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),  # deeper than Python reads
        (b'{"a": NaN}', "NaN is not a JSON value"),
        (b'{"a": [1, -Infinity]}', "-Infinity is not a JSON value"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' occurs twice"),
        (b'{"x": [{"a": 1, "a": 2}]}', "the key 'a' occurs twice"),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else None,
)
def test_what_is_no_json_object_is_refused_by_name(tmp_path, content, problem):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_infinity_is_a_number(tmp_path):
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_json(tmp_path / "config.json") == {"time_step_limit": [0, float("inf")]}


def test_values_are_shown_shortened():
    assert shown("gelu") == "'gelu'"
    assert shown([1, 2.5, None]) == "[1, 2.5, None]"
    assert len(shown("x" * 10**6)) <= 100
    assert len(shown([["x" * 1000] * 1000] * 1000)) < 5000


def test_what_a_terminal_would_obey_is_escaped_in_the_log(capsys):
    assert escaped("a\tb\n\x1b[2J\x9b\u202e\udc80é你") == "a\tb\n\\x1b[2J\\x9b\\u202e\\udc80é你"
    logging.getLogger("nanopage").error("a file says \x1b]0;title\x07")
    assert capsys.readouterr().err == "nanopage: a file says \\x1b]0;title\\x07\n"
