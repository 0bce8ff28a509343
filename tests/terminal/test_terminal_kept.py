"""nanopage/terminal/session.py: a conversation is kept in a private file of its own, and none replaces another."""

import stat

import pytest

from nanopage import SamplingParams
from nanopage.terminal.session import MOST, Kept, Session, may_keep


def session(*turns: str) -> Session:
    messages = [{"role": role, "content": turn} for turn in turns for role in ("user", "assistant")]
    return Session(SamplingParams(), messages=messages)


def contents(kept: Kept) -> list[list[str]]:
    """The user's messages of each kept conversation, the latest first."""
    read = []
    for file in kept.directory.glob("*.json"):
        one = session()
        one.load(file)
        read.append([message["content"] for message in one.messages[::2]])
    return sorted(read)


def test_a_conversation_is_kept_in_one_private_file_while_it_goes_on(tmp_path):
    kept = Kept(tmp_path / "state" / "conversations")
    kept.keep(session())
    assert kept.earlier() == []  # nothing was said: no file, no directory
    assert not kept.directory.exists()
    kept.keep(session("one"))
    kept.keep(session("one", "two"))
    (file,) = kept.directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.directory.stat().st_mode) == 0o700
    assert contents(kept) == [["one", "two"]]
    before = file.stat().st_mtime_ns
    kept.keep(session("one", "two"))
    assert file.stat().st_mtime_ns == before  # unchanged: not written again
    kept.begin()
    kept.keep(session("other"))
    assert contents(kept) == [["one", "two"], ["other"]]
    assert kept.earlier() == [file]


def test_two_terminals_that_go_on_with_one_conversation_keep_both(tmp_path):
    first = Kept(tmp_path)
    first.keep(session("one"))
    (file,) = tmp_path.iterdir()
    ours, theirs = Kept(tmp_path), Kept(tmp_path)
    for kept in (ours, theirs):
        assert kept.earlier() == [file]
        kept.begin(file, session("one"))
        kept.keep(session("one"))
    assert list(tmp_path.iterdir()) == [file]  # read, and not changed
    ours.keep(session("one", "ours"))
    assert not file.exists()
    theirs.keep(session("one", "theirs"))
    assert contents(first) == [["one", "ours"], ["one", "theirs"]]


def test_a_file_of_the_user_is_never_replaced(tmp_path):
    session("mine").save(tmp_path / "2026.json")
    kept = Kept(tmp_path / "conversations")
    kept.begin(tmp_path / "2026.json", session("mine"))
    kept.keep(session("mine", "more"))
    assert (tmp_path / "2026.json").exists()
    assert contents(kept) == [["mine", "more"]]


def test_the_oldest_conversations_go(tmp_path):
    for i in range(MOST + 3):
        Kept(tmp_path).keep(session(f"{i:02}"))
    assert contents(Kept(tmp_path)) == [[f"{i:02}"] for i in range(3, MOST + 3)]


@pytest.mark.parametrize(("value", "allowed"), [("0", False), ("1", True), ("", True), (None, True)])
def test_the_user_may_refuse_by_a_variable(monkeypatch, value, allowed):
    monkeypatch.delenv("NANOPAGE_HISTORY", raising=False)
    if value is not None:
        monkeypatch.setenv("NANOPAGE_HISTORY", value)
    assert may_keep() == allowed


def test_a_variable_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv("NANOPAGE_HISTORY", "no")
    with pytest.raises(ValueError, match="NANOPAGE_HISTORY must be 0 or 1, got 'no'"):
        may_keep()
