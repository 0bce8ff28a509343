"""terminal/conversation.py: every command, what is sent and what is dropped, on a tiny model in this process."""

import json
import os
import signal

import pytest
from helpers import tiny_model

from nanopage import LLM, SamplingParams
from terminal.conversation import COMMANDS, Conversation
from terminal.session import SETTINGS, Session

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("model"))
    return LLM(str(path), device="cpu", max_model_len=256, num_gpu_blocks_override=64, enforce_eager=True, block_size=4)


@pytest.fixture
def chat(llm, monkeypatch):
    """A conversation whose prompts are recorded in `chat.sent`."""
    llm.engine.reset_prefix_cache()
    made, sent, stream = Conversation(llm, Session(GREEDY, model="tiny"), raw=False, plain=True), [], llm.stream
    monkeypatch.setattr(llm, "stream", lambda prompt, params: sent.append(prompt) or stream(prompt, params))
    made.sent = sent
    yield made
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.block_manager.num_free_blocks == 64


def texts(messages) -> list[str]:
    return [message["content"] for message in messages]


def test_each_turn_reuses_what_the_turns_before_have_computed(chat, capsys):
    for message in ("where is the cat?", "and the dog?", "and the men?"):
        chat.take(message)
    assert texts(chat.sent[2])[::2] == ["where is the cat?", "and the dog?", "and the men?"]
    cached = [reply.num_cached_tokens for reply in chat.replies]
    assert cached[0] == 0 < cached[1] < cached[2]
    shown = capsys.readouterr()
    assert shown.out == "".join(f"{reply.text}\n" for reply in chat.replies)
    assert f"({cached[2]} cached), 6 out, TTFT" in shown.err
    assert "length; context" in shown.err


def test_what_is_tokenized_otherwise_than_it_was_generated_is_said(chat, capsys, llm):
    chat.take("where is the cat?")
    assert "tokenized" not in capsys.readouterr().err
    chat.session.messages[1]["content"] = "other words"  # as a template that rewrites the reply would
    chat.take("and the dog?")
    shown = " ".join(capsys.readouterr().err.split())
    assert "is not tokenized as it was generated: the cache serves what is before" in shown


def test_an_unknown_command_is_never_sent_and_two_slashes_are_a_message(chat):
    for text, hint in (
        ("/hlep", "did you mean /help"),
        (" /sav e", "did you mean /save"),
        ("/xyzzy now", "see /help"),
        ("/", "no command /: see"),
        ("/help\nme", "/help takes no argument"),
        ("/undo 3", "/undo takes no argument"),
    ):
        with pytest.raises(ValueError, match=hint):
            chat.take(text)
    chat.take("")
    chat.take("  \n")
    assert chat.sent == []
    chat.take("//help is a command")
    chat.take('"""\n/not a command\n  indented\n"""')
    assert texts(chat.session.messages)[::2] == ["/help is a command", "/not a command\n  indented"]


def test_help_names_every_command_and_show_every_setting(chat, capsys):
    chat.take("/help")
    shown = capsys.readouterr().err
    assert all(name in shown for name in COMMANDS)
    assert "oldest turns" in shown
    chat.take("/system Be brief [bold].")
    chat.take("/show")
    shown = capsys.readouterr().err
    assert all(name in shown for name in SETTINGS)
    assert "Be brief [bold]." in shown


def test_system_is_sent_shown_and_removed(chat, capsys):
    chat.take("/system")
    assert "no system message" in capsys.readouterr().err
    chat.take('/system """\nBe\nbrief.\n"""')
    chat.take("where?")
    assert chat.sent[0][0] == {"role": "system", "content": "Be\nbrief."}
    chat.take("/system")
    assert "Be\nbrief." in capsys.readouterr().err
    chat.take('/system ""')
    chat.take("who?")
    assert chat.sent[1][0]["role"] == "user"


def test_set_changes_the_next_reply_and_refuses_with_the_engines_words(chat):
    chat.take("/set max_tokens 3")
    chat.take("where?")
    assert chat.replies[-1].num_output_tokens == 3
    for text, names in (("/set temperature -1", "temperature must be in"), ("/set", "/set NAME VALUE"),
                        ("/set top_k", "/set NAME VALUE"), ("/set tpo_k 3", "did you mean top_k")):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=names):
            chat.take(text)
    chat.take("/set allowed_token_ids [99999]")  # in range for anybody, not for this model
    with pytest.raises(ValueError, match="99999"):
        chat.take("who?")
    assert texts(chat.session.messages)[::2] == ["where?"]


def test_undo_clear_and_regen(chat, capsys):
    for command in ("/undo", "/regen"):
        with pytest.raises(ValueError, match=r"nothing to undo|no reply"):
            chat.take(command)
    chat.take("one")
    chat.take("two")
    before = [dict(message) for message in chat.session.messages]
    chat.take("/regen")
    assert "the reply will be the same" in capsys.readouterr().err
    assert chat.session.messages == before  # greedy
    assert chat.sent[2] == chat.sent[1]
    chat.take("/set temperature 2.0")
    chat.take("/regen")
    assert chat.session.messages[:3] == before[:3]
    assert chat.session.messages[3] != before[3]
    chat.take("/undo")
    assert chat.session.messages == before[:2]
    chat.take("/system Kept.")
    chat.take("/clear")
    assert (chat.session.messages, chat.session.system, chat.session.params.temperature) == ([], "Kept.", 2.0)
    chat.take("three")
    assert texts(chat.sent[-1]) == ["Kept.", "three"]


def test_save_and_load_go_on_where_it_was(chat, llm, tmp_path, capsys):
    chat.take("/system Be brief.")
    chat.take("one")
    chat.take("/set top_k 7")
    chat.take(f"/save {tmp_path}/my session.json")
    other = Conversation(llm, Session(SamplingParams(), model="other"), raw=False, plain=True)
    other.take(f"/load {tmp_path}/my session.json")
    assert (other.session.messages, other.session.params) == (chat.session.messages, chat.session.params)
    shown = " ".join(capsys.readouterr().err.split())
    assert "1 turn(s) from" in shown
    assert "They were with tiny, not other." in shown
    other.take("two")
    assert texts(chat.sent[-1]) == ["Be brief.", "one", chat.session.messages[1]["content"], "two"]
    assert json.loads((tmp_path / "my session.json").read_text())["messages"] == chat.session.messages
    for text in ("/save", "/load", f"/load {tmp_path}/missing"):
        with pytest.raises((ValueError, OSError), match=r"FILE|missing"):
            chat.take(text)


def test_stats_count_replies_and_blocks(chat, capsys):
    chat.take("/stats")
    assert "replies     0" in capsys.readouterr().err
    chat.take("one")
    capsys.readouterr()
    chat.take("/stats")
    shown = capsys.readouterr().err
    assert "replies     1" in shown
    assert "tokens out  6" in shown
    assert "0 in use" in shown
    assert "64 in all, of 4 tokens" in shown


def test_when_the_context_is_full_whole_oldest_turns_go_at_once_and_the_system_message_stays(chat, capsys):
    chat.take("/system Be brief.")
    warned = False
    for i in range(12):
        chat.take(f"{i} " + "the cat and the dog " * 3)
        shown = " ".join(capsys.readouterr().err.split())
        if "no longer sent" in shown:
            break
        warned = "of the context is used: when the context is full the oldest turns are left out" in shown
    assert warned  # by the reply before
    sent, messages = chat.sent[-1], chat.session.messages
    first = chat.session.first
    assert first > 0
    assert first % 2 == 0
    assert f"the oldest {first // 2} turn(s)" in shown
    assert sent[0]["content"] == "Be brief."
    assert sent[1:] == messages[first:-1]  # nothing else is missing, and the session still has all
    assert len(messages) == 2 * (i + 1)
    assert chat.llm.count_tokens(sent) <= 256 * 3 // 4
    assert chat.llm.count_tokens([sent[0], *messages[first - 2 : -1]]) > 256 * 3 // 4  # no more than needed
    chat.take("and then?")
    assert chat.session.first == first  # there is room again


def test_a_message_that_can_never_fit_is_refused_and_loses_nothing(chat):
    chat.take("one")
    before = list(chat.session.messages)
    with pytest.raises(ValueError, match="leaves no room for output in max_model_len=256"):
        chat.take("the cat " * 300)
    assert (chat.session.messages, chat.session.first) == (before, 0)


@pytest.mark.parametrize("after", [0, 3])
def test_ctrl_c_keeps_what_came_and_frees_its_blocks(chat, monkeypatch, capsys, after):
    step, calls = chat.llm.engine.step, []

    def interrupted():
        calls.append(1)
        if after == 0:
            raise KeyboardInterrupt  # the second one, in the middle of a step
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(chat.llm.engine, "step", interrupted)
        chat.take("one")
    shown = capsys.readouterr().err
    if after == 0:
        assert chat.session.messages == []
        assert "the conversation is as it was" in " ".join(shown.split())
    else:
        assert "3 out" in shown
        assert "stopped by Ctrl-C" in shown
        assert chat.session.messages[1]["content"] == chat.replies[0].text != ""
    chat.take("two")
    assert chat.replies[-1].num_output_tokens == 6


def test_raw_goes_on_with_one_text(chat, llm, tmp_path):
    raw = Conversation(llm, Session(GREEDY, model="tiny"), raw=True, plain=True)
    raw.take("the cat")
    raw.take(" and then")
    assert chat.sent == ["the cat", "the cat" + raw.replies[0].text + " and then"]
    with pytest.raises(ValueError, match="--raw has no chat template"):
        raw.take("/system Be brief.")
    chat.session.system = "Be brief."
    chat.take(f"/save {tmp_path}/s.json")
    with pytest.raises(ValueError, match=r"s\.json has a system message"):
        raw.take(f"/load {tmp_path}/s.json")
    assert len(raw.session.messages) == 4
