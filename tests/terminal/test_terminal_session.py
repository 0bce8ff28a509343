"""nanopage/terminal/session.py: the engine checks settings; the file is private, atomic and refused by name."""

import json
import os
import stat

import pytest

from nanopage import SamplingParams
from nanopage.terminal.session import FORMAT, VERSION, Session, state_directory

MESSAGES = [{"role": "user", "content": "where?\n日本 🙂"}, {"role": "assistant", "content": "there"}]


def session(**changes) -> Session:
    params = SamplingParams(temperature=0.5, max_tokens=7, stop=["\n"], logit_bias={5: -2.0}, seed=3)
    return Session(params, **{"system": "Be brief.", "messages": list(MESSAGES), "model": "tiny"} | changes)


def test_a_session_comes_back_as_it_was(tmp_path):
    saved, loaded = session(), Session(SamplingParams(), model="other", first=2)
    saved.save(tmp_path / "s.json")
    assert loaded.load(tmp_path / "s.json") == "tiny"
    assert (loaded.params, loaded.system, loaded.messages) == (saved.params, saved.system, saved.messages)
    assert (loaded.model, loaded.first) == ("other", 0)
    assert stat.S_IMODE((tmp_path / "s.json").stat().st_mode) == 0o600
    saved.messages = []
    saved.save(tmp_path / "s.json")  # a session may be replaced by another
    loaded.load(tmp_path / "s.json")
    assert loaded.messages == []


def test_nothing_but_a_session_is_overwritten(tmp_path):
    for text in ("my notes", "{}", '{"format": "another"}'):
        (tmp_path / "notes").write_text(text)
        with pytest.raises(ValueError, match=r"notes exists and is not a session"):
            session().save(tmp_path / "notes")
        assert (tmp_path / "notes").read_text() == text
    with pytest.raises(ValueError, match="not a session"):
        session().save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no directory .*missing"):
        session().save(tmp_path / "missing" / "s.json")


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_save_that_fails_leaves_the_old_file_and_no_scraps(tmp_path, monkeypatch, broken):
    session().save(tmp_path / "s.json")
    before = (tmp_path / "s.json").read_bytes()

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match="disk full"):
        session(messages=[]).save(tmp_path / "s.json")
    assert [file.name for file in tmp_path.iterdir()] == ["s.json"]
    assert (tmp_path / "s.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda d: "{", "not valid JSON"),
        (lambda d: "[]", "not a JSON object"),
        (lambda d: d | {"format": "x"}, "not a session"),
        (lambda d: d | {"version": VERSION + 1}, "newer nanopage"),
        (lambda d: d | {"version": "1"}, "version must be"),
        (lambda d: d | {"version": True}, "version must be"),
        (lambda d: d | {"more": 1}, "not known: more"),
        (lambda d: {k: v for k, v in d.items() if k != "messages"}, "messages missing"),
        (lambda d: d | {"model": None}, "model must be"),
        (lambda d: d | {"system": 5}, "system must be"),
        (lambda d: d | {"messages": MESSAGES[:1]}, "pairs"),
        (lambda d: d | {"messages": MESSAGES[::-1]}, r"messages\[0\]"),
        (lambda d: d | {"messages": [{"role": "user", "content": 5}, MESSAGES[1]]}, r"messages\[0\]\['content'\]"),
        (lambda d: d | {"settings": []}, "settings must be"),
        (lambda d: d | {"settings": {"temprature": 1}}, "temprature.*Did you mean temperature"),
        (lambda d: d | {"settings": {"n": 2}}, "n cannot be set"),
        (lambda d: d | {"settings": {"top_p": 3}}, "top_p must be a number above 0 and at most 1, not 3"),
        (lambda d: d | {"settings": {"max_tokens": "7"}}, "max_tokens must be an integer"),
    ],
)
def test_a_damaged_or_newer_file_is_refused_by_name_and_changes_nothing(tmp_path, change, names):
    file = tmp_path / "s.json"
    session().save(file)
    changed = change(json.loads(file.read_text()))
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    loaded = session(system="mine")
    with pytest.raises(ValueError, match=f"s.json.*{names}"):
        loaded.load(file)
    assert loaded == session(system="mine")


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*s\.json"):
        session().load(tmp_path / "s.json")
    (tmp_path / "s.json").write_bytes(b"\xff\xfe" + FORMAT.encode())
    with pytest.raises(ValueError, match=r"s\.json"):
        session().load(tmp_path / "s.json")
    with pytest.raises(ValueError, match="is not a regular file"):
        session().load(tmp_path)


def test_a_pipe_a_device_and_a_huge_file_are_refused_and_never_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: reading would wait forever
    with open(tmp_path / "huge.json", "wb") as huge:
        huge.truncate(60_000_000)
    monkeypatch.setattr("nanopage.terminal.session.read_json", lambda file: pytest.fail(f"{file} was read"))
    refusals = {"pipe": "pipe is not a regular file", "/dev/zero": "/dev/zero is not a regular file"}
    for name, refused in (refusals | {"huge.json": "huge.json is not a session: it has 57 MiB"}).items():
        with pytest.raises(ValueError, match=refused):
            session().load(tmp_path / name)
        with pytest.raises(ValueError, match="exists and is not a session"):
            session().save(tmp_path / name)


def test_text_that_no_tokenizer_can_read_is_refused_by_name(tmp_path):
    session().save(tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text())
    messages = [{"role": "user", "content": "\udfff"}, MESSAGES[1]]
    for change in ({"system": "\ud800"}, {"settings": {"stop": ["\udc80"]}}, {"messages": messages}):
        (tmp_path / "s.json").write_text(json.dumps(data | change))
        with pytest.raises(ValueError, match=r"s\.json is not valid JSON: it has the lone surrogate"):
            session().load(tmp_path / "s.json")


def test_a_relative_state_directory_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("state", "", "./x"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert state_directory() == tmp_path / ".local" / "state" / "nanopage"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    assert state_directory() == tmp_path / "s" / "nanopage"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("top_k", " 5 ", 5),
        ("seed", "none", None),
        ("seed", "null", None),
        ("ignore_eos", "True", True),
        ("ignore_eos", "false", False),
        ("stop", "END", ["END"]),
        ("stop", '"\\n\\n"', ["\n\n"]),
        ("stop", "['a', 'b']", ["a", "b"]),
        ("bad_words", '["x y"]', ["x y"]),
        ("logit_bias", '{"5": 1.5}', {5: 1.5}),
        ("logit_bias", "{5: 1.5}", {5: 1.5}),
        ("max_tokens", "none", None),
    ],
)
def test_settings_are_typed_as_json_or_python_would_write_them(name, text, value):
    assert getattr(session().changed(name, text), name) == value


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("temperature", "-1", "temperature must be a number from 0 to 100, not -1"),
        ("temperature", "warm", "temperature must be a number from 0 to 100, not 'warm'"),
        ("temperature", "NaN", "temperature must be a number from 0 to 100, not nan"),
        ("top_k", "2.5", "top_k must be an integer"),
        ("min_tokens", "8", "min_tokens=8 is more than max_tokens=7"),
        ("stop", '[""]', "stop must not contain an empty string"),
        ("temprature", "1", "no setting 'temprature'. Did you mean temperature.*max_tokens"),
        ("n", "2", "n cannot be set here"),
        ("logprobs", "2", "logprobs cannot be set here"),
        ("stop", '"a\\ud800"', r"stop has a lone surrogate, U\+D800"),
        ("bad_words", '["\\udfff"]', r"bad_words has a lone surrogate, U\+DFFF"),
    ],
)
def test_a_wrong_setting_is_named_and_changes_nothing(name, text, names):
    unchanged = session()
    with pytest.raises((ValueError, TypeError), match=names):
        unchanged.changed(name, text)
    assert unchanged == session()
