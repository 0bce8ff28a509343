"""nanopage/terminal/conversation.py and commands.py: every command, what is sent and what is dropped."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time

import pytest
from helpers import tiny_model
from test_terminal_text import Panic

import nanopage.terminal.conversation
from nanopage import LLM, SamplingParams
from nanopage.terminal.commands import ALIASES, COMMANDS, WITH_ALIASES
from nanopage.terminal.conversation import Conversation
from nanopage.terminal.local import LocalModel, check_model
from nanopage.terminal.reply import Reply, generate
from nanopage.terminal.session import SETTINGS, Kept, Session
from nanopage.terminal.text import printable
from nanopage.weights import hub

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("model"))
    return LLM(str(path), device="cpu", max_model_len=256, num_gpu_blocks_override=64, enforce_eager=True, block_size=4)


@pytest.fixture
def chat(llm, monkeypatch):
    """A conversation whose prompts are recorded in `chat.sent`."""
    llm.engine.reset_prefix_cache()
    made, sent = talk(llm), []

    def recorded_generate(model, request, *args):
        sent.append(request.prompt)
        return generate(model, request, *args)

    monkeypatch.setattr(nanopage.terminal.conversation, "generate", recorded_generate)
    made.sent, made.llm = sent, llm
    yield made
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.block_manager.num_free_blocks == 64


def talk(llm, session=None, **options) -> Conversation:
    session = session or Session(GREEDY, model="tiny")
    return Conversation(LocalModel(llm), session, WITH_ALIASES, **{"raw": False, "plain": True} | options)


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
    assert f"({cached[2]} cached), 6 out, " in shown.err
    assert "cut at max_tokens 6 (/continue goes on)" in shown.err


def test_what_is_tokenized_otherwise_than_it_was_generated_is_said_to_who_wants_to_know(chat, capsys, llm):
    chat.verbose = True
    chat.take("where is the cat?")
    assert "tokenized" not in capsys.readouterr().err
    chat.session.messages[1]["content"] = "other words"  # as a template that rewrites the reply would
    chat.take("and the dog?")
    shown = " ".join(capsys.readouterr().err.split())
    assert "is not tokenized as it was generated: the cache serves what is before" in shown


def test_an_unknown_command_is_never_sent_and_two_slashes_are_a_message(chat):
    for text, hint in (
        ("/hlep", "Did you mean /help"),
        (" /sav e", "Did you mean /save"),
        ("/xyzzy now", "see /help"),
        ("/", "no command /: see"),
        ("/z", "no command /z: see"),
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


def test_help_names_every_command_set_every_setting_and_show_those_that_are_not_the_default(chat, capsys):
    chat.take("/help")
    shown = capsys.readouterr().err
    assert all(name in shown for name in COMMANDS)
    assert "oldest turns" in shown
    chat.take("/set")
    shown = capsys.readouterr().err
    assert all(name in shown for name in SETTINGS)
    chat.take("/system Be brief [bold].")
    chat.take("/set top_k 7")
    capsys.readouterr()
    chat.take("/show")
    shown = capsys.readouterr().err
    assert {name for name in SETTINGS if name in shown} == {"temperature", "max_tokens", "ignore_eos", "top_k"}
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
    before = chat.session.params
    for text, names in (
        ("/set temperature -1", "temperature must be a number from 0 to 100, not -1"),
        ("/set top_k=", "/set top_k= needs a value"),
        ("/set tpo_k 3", "Did you mean top_k"),
        ("/set =3", "no setting ''"),
        # In range for anybody, not for this model.
        ("/set allowed_token_ids [99999]", "allowed_token_ids: 99999 is not in the vocabulary"),
        ("/set stop_token_ids [-1]", "stop_token_ids: -1"),
        ('/set logit_bias {"300": 1}', "logit_bias: 300"),
        ("/set min_tokens 9", "min_tokens=9 is more than max_tokens=3"),
    ):
        with pytest.raises((ValueError, TypeError), match=names):
            chat.take(text)
    assert chat.session.params == before
    assert texts(chat.session.messages)[::2] == ["where?"]


def test_set_shows_one_takes_an_equals_sign_and_resets(chat, capsys):
    for text, shown, value in (
        ("/set max_tokens", "max_tokens = 6", 6),
        ("/set max_tokens=3", "max_tokens = 3", 3),
        ("/set max_tokens = 4", "max_tokens = 4", 4),
        ("/set max_tokens", "max_tokens = 4", 4),
        ("/set max_tokens default", "max_tokens = 6", 6),
    ):
        chat.take(text)
        assert capsys.readouterr().err.strip() == shown
        assert chat.session.params.max_tokens == value
    chat.take("/set stop ==")
    assert chat.session.params.stop == ["="]
    chat.take('/set stop "default"')
    assert chat.session.params.stop == ["default"]
    chat.take("/set")
    assert "repetition_penalty" in capsys.readouterr().err


def test_a_stop_string_is_searched_in_the_answer_and_not_in_the_reasoning(chat, monkeypatch):
    prompts, stream = [], chat.llm.stream
    monkeypatch.setattr(chat.llm, "stream", lambda prompt, params: prompts.append(prompt) or stream(prompt, params))
    template = chat.llm.get_tokenizer().chat_template
    for form in (template, template + "{# <think> #}", template + "<think>"):
        monkeypatch.setattr(chat.llm.get_tokenizer(), "chat_template", form)
        chat.take("a cat?")
    assert [prompt["reasoning"] for prompt in prompts] == [None, False, True]


def test_aliases(chat, capsys):
    chat.take("/?")
    shown = " ".join(capsys.readouterr().err.split())
    assert all(f"{alias} for {name}" in shown for alias, name in ALIASES.items())
    for alias in ("/bye", "/quit"):
        chat.done = False
        chat.take(alias)
        assert chat.done


def test_continue_goes_on_where_the_reply_was_cut(chat, capsys):
    with pytest.raises(ValueError, match="no reply to continue"):
        chat.take("/continue")
    chat.take("where is the cat?")
    chat.take("/continue")
    assert "cut at max_tokens 6 (/continue goes on)" in " ".join(capsys.readouterr().err.split())
    in_parts, ids = chat.session.messages, chat.last_ids
    assert chat.replies[1].num_cached_tokens > chat.replies[0].num_prompt_tokens - 4
    chat.take("/clear")
    chat.take("/set max_tokens 12")
    chat.take("where is the cat?")
    assert ids == chat.last_ids  # as if it had not been cut
    assert in_parts == chat.session.messages
    for _ in range(3):
        chat.take("/undo")
    assert texts(chat.session.messages)[1] == chat.replies[0].text
    chat.take("/continue")  # whose tokens are no longer known
    assert texts(chat.session.messages)[1].startswith(chat.replies[0].text)
    chat.last.finish_reason = "stop"
    with pytest.raises(ValueError, match="is whole: it ended by itself"):
        chat.take("/continue")


def test_a_reply_cut_within_a_character_goes_on_with_the_whole_character(chat):
    tokenizer = chat.llm.get_tokenizer()
    ids = tokenizer.encode("ab日本")
    chat.session.messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ab日\ufffd"}]
    chat.last_ids = ids[:-1]  # 日 and two bytes of 本
    chat.take("/continue")
    assert texts(chat.session.messages)[1].startswith("ab日")
    assert chat.last_ids[: len(ids) - 3] == ids[:-3]
    assert "日\ufffd" not in texts(chat.session.messages)[1] or chat.last_ids[len(ids) - 3] != ids[-3]


def test_a_reply_that_repeats_itself_is_ended(chat, capsys, monkeypatch):
    monkeypatch.setattr("nanopage.terminal.guard.WINDOW", 10)
    chat.take("/set allowed_token_ids [65, 66]")
    chat.take("/set logit_bias {65: 100}")
    chat.take("/set max_tokens 200")
    chat.take("sing")
    assert chat.last.finish_reason == "repetition"
    assert 40 <= chat.last.num_output_tokens < 190
    assert "stopped: repeating itself (/continue goes on)" in capsys.readouterr().err
    chat.take("/continue")  # and is ended again, no sooner
    assert chat.last.num_output_tokens >= 40


def test_regen_keeps_the_earlier_reply_within_reach(chat, monkeypatch, capsys):
    chat.take("/set temperature 2.0")
    chat.take("one")
    first = chat.session.messages
    step, calls = chat.llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(chat.llm.engine, "step", interrupted)
        chat.take("/regen")
    assert chat.session.messages != first
    capsys.readouterr()
    chat.take("/undo")
    assert chat.session.messages == first
    assert "The earlier reply is back; 1 turn(s)" in capsys.readouterr().err
    chat.take("/clear")
    chat.take("/undo")
    assert chat.session.messages == first
    chat.take("/undo")
    assert chat.session.messages == []


def test_edit_sends_what_the_editor_saves(chat, monkeypatch, tmp_path, capsys):
    editor = tmp_path / "my editor"
    editor.write_text('#!/bin/sh\nstat -c %a $(dirname $2) >> seen; cat $2 >> seen; eval "$CHANGE"\n')
    editor.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"'{editor}' --wait")
    for change in ("", "echo > $2", "rm $2"):
        monkeypatch.setenv("CHANGE", change)
        chat.take("/edit")
    assert chat.session.messages == []
    monkeypatch.setenv("CHANGE", "printf 'one\\nmore \\351\\n' > $2")
    chat.take("/edit")
    assert texts(chat.session.messages)[0] == "one\nmore \ufffd"
    (tmp_path / "seen").unlink()
    monkeypatch.setenv("CHANGE", "exit 3")
    with pytest.raises(ValueError, match="failed with exit code 3: nothing is sent"):
        chat.take("/edit")
    assert (tmp_path / "seen").read_text() == "700\none\nmore \ufffd"  # private; begins with the last message
    monkeypatch.setenv("VISUAL", "no-such-editor")
    with pytest.raises(ValueError, match="no-such-editor cannot be run"):
        chat.take("/edit")


def test_kept_conversations_are_listed_and_loaded_by_number(chat, llm, tmp_path, capsys):
    with pytest.raises(ValueError, match="no other conversation is kept"):
        chat.take("/load")
    for question in ("first \x1b[2J question", "second question"):
        other = talk(llm, kept=Kept(tmp_path))
        other._take_safely(question)
    (tmp_path / "2000-broken.json").write_text("{")
    os.utime(tmp_path / "2000-broken.json", (0, 0))
    chat.kept = Kept(tmp_path)
    capsys.readouterr()
    chat.take("/load")
    one, two, three = capsys.readouterr().err.split("\n")[:3]
    assert one.startswith("1 ")
    assert "1 turn(s)" in one
    assert one.rstrip().endswith("second question")
    assert two.rstrip().endswith("first \\x1b[2J question")
    assert three.rstrip().endswith("it is damaged")
    chat.take("/load 1")
    assert texts(chat.session.messages)[0] == "second question"
    with pytest.raises(ValueError, match=r"no kept conversation 7: /load lists them \(\./7 is a file\)"):
        chat.take("/load 7")
    chat._take_safely("more")
    assert len(list(tmp_path.glob("*.json"))) == 3  # the file that it came from is replaced
    assert texts(chat.session.messages)[::2] == ["second question", "more"]


def test_a_conversation_that_cannot_be_kept_is_said_once_and_goes_on(chat, tmp_path, capsys):
    (tmp_path / "file").touch()
    chat.kept = Kept(tmp_path / "file" / "conversations")
    chat._take_safely("one")
    assert capsys.readouterr().err.count("no longer kept") == 1
    chat._take_safely("two")
    assert "kept" not in capsys.readouterr().err
    assert len(chat.session.messages) == 4


def test_settings_of_a_file_are_checked_against_this_model(chat, tmp_path):
    file = tmp_path / "s.json"
    Session(dataclasses.replace(GREEDY, stop_token_ids=[5000])).save(file)
    with pytest.raises(ValueError, match=r"s\.json has settings that this model refuses: stop_token_ids: 5000"):
        chat.take(f"/load {file}")
    assert chat.session.params == GREEDY


def test_model_changes_the_model_and_keeps_the_conversation(chat, llm, tmp_path, capsys):
    """The second model is a stand-in: one that was loaded before."""
    other = LLM(
        str(tiny_model(tmp_path / "other", seed=1)), device="cpu", num_gpu_blocks_override=64, enforce_eager=True
    )
    loaded = []

    class Load:
        def check(self, model, sight):
            check_model(hub.resolve(model), raw=False, sight=sight)

        def __call__(self, model):
            loaded.append(model)
            if model == str(tmp_path / "late"):
                raise MemoryError("no room")
            is_other = model == str(tmp_path / "other")
            return (
                (LocalModel(other), "other", SamplingParams(top_k=9)) if is_other else (LocalModel(llm), "tiny", GREEDY)
            )

    with pytest.raises(ValueError, match="cannot be changed"):
        chat.take("/model x")
    shutil.copytree(llm.engine.model_path, tmp_path / "tiny")
    chat.load, chat.argument, chat.arguments = Load(), str(tmp_path / "tiny"), {"tiny": str(tmp_path / "tiny")}
    chat.take("one")
    chat.take("/set top_p 0.5")
    (tmp_path / "base").mkdir()
    for name in ("missing", "base"):
        with pytest.raises((ValueError, OSError), match=name):
            chat.take(f"/model {tmp_path / name}")
    assert loaded == []  # nothing was unloaded for a model that cannot be
    chat.take(f"/model {tmp_path / 'other'}")
    assert "other, float32 on cpu" in capsys.readouterr().err
    assert chat.model.llm is other
    assert (chat.session.params.top_k, chat.session.params.top_p) == (9, 0.5)  # its own, and what was set
    chat.take("two")
    assert texts(chat.sent[-1])[::2] == ["one", "two"]
    shutil.copytree(tmp_path / "other", tmp_path / "late")
    with pytest.raises(MemoryError, match="no room"):
        chat.take(f"/model {tmp_path / 'late'}")
    assert loaded[-1] == str(tmp_path / "other")  # which is there again
    assert chat.model.llm is other
    chat.take("/model")
    assert "other, float32 on cpu" in capsys.readouterr().err
    del loaded[:]
    for shown in ("tiny", "other"):  # a name that was shown is as good as the argument
        chat.take(f"/model {shown}")
    assert loaded == [str(tmp_path / "tiny"), str(tmp_path / "other")]


@pytest.mark.parametrize("error", [Panic("in Rust"), KeyError("lost"), AssertionError(), ValueError("no")])
def test_no_error_ends_the_conversation(chat, monkeypatch, capsys, error):
    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(nanopage.terminal.conversation, "generate", fail)
        chat._take_safely("one")
    shown = " ".join(capsys.readouterr().err.split())
    assert ("internal error: " + type(error).__name__ in shown) == (not isinstance(error, ValueError))
    assert "Traceback" not in shown
    chat._take_safely("two")
    assert texts(chat.session.messages)[::2] == ["two"]


class Typist:
    """A prompt at which a script types: text, or an exception that it raises, after typing or not."""

    dumb = False
    why_no_history = ""

    def __init__(self, *inputs):
        self.inputs, self.typed = list(inputs), False

    def read(self):
        text, self.typed = self.inputs.pop(0)
        if isinstance(text, BaseException):
            raise text
        return text


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ([(KeyboardInterrupt(), False), (KeyboardInterrupt(), False)], 130),
        ([(KeyboardInterrupt(), True), (KeyboardInterrupt(), True), (EOFError(), False)], 0),
        ([(KeyboardInterrupt(), False), (KeyboardInterrupt(), True), (EOFError(), False)], 0),
        ([(KeyboardInterrupt(), False), ("/help", True), (KeyboardInterrupt(), False), (EOFError(), False)], 0),
    ],
)
def test_only_two_ctrl_c_on_empty_lines_in_a_row_leave_and_the_conversation_is_kept(
    chat, monkeypatch, tmp_path, inputs, code
):
    typist = Typist(("hello", True), *inputs)
    monkeypatch.setattr(nanopage.terminal.conversation, "Prompt", lambda history, commands: typist)
    chat.kept = Kept(tmp_path)
    assert chat.run() == code
    assert typist.inputs == []
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_reply_keeps_what_came_and_leaves_with_its_code(chat, monkeypatch, tmp_path, signum):
    step, calls = chat.llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signum)
        return step()

    typist = Typist(("hello", True))
    monkeypatch.setattr(nanopage.terminal.conversation, "Prompt", lambda history, commands: typist)
    monkeypatch.setattr(chat.llm.engine, "step", interrupted)
    chat.kept = Kept(tmp_path)
    with pytest.raises(SystemExit) as left:
        chat.run()
    assert left.value.code == 128 + signum
    (file,) = tmp_path.glob("*.json")
    kept = Session(GREEDY)
    kept.load(file)
    assert texts(kept.messages) == ["hello", chat.replies[0].text]
    assert chat.replies[0].num_output_tokens == 3


def test_a_prompt_is_read_in_chunks_and_a_first_ctrl_c_ends_the_reading_after_one(tmp_path, monkeypatch, capsys):
    path = tiny_model(tmp_path / "model")
    llm = LLM(str(path), device="cpu", num_gpu_blocks_override=64, enforce_eager=True, max_num_batched_tokens=16)
    chat = talk(llm)
    shown = []

    @contextlib.contextmanager
    def recorded(text, delay):
        shown.append(text)
        yield shown.append

    monkeypatch.setattr("nanopage.terminal.local.spinner", recorded)
    chat.take("the cat and the dog " * 4)  # 37 tokens
    tokens = chat.replies[0].num_prompt_tokens
    assert shown == [f"reading {tokens} tokens", *(f"reading {n} of {tokens} tokens" for n in (16, 32, tokens))]
    step, calls, listeners = llm.engine.step, [], list(llm.engine.listeners)

    def interrupted():
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            while "stopping... press Ctrl-C again to stop now" not in shown:
                time.sleep(0.01)  # it is said while the step still runs
        return step()

    shown.clear()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        chat.take("another thing " * 20)
    assert len(calls) == 2
    assert "the conversation is as it was" in " ".join(capsys.readouterr().err.split())
    assert len(chat.session.messages) == 2
    assert llm.engine.listeners == listeners
    assert llm.engine.scheduler.block_manager.num_free_blocks == 64


@pytest.mark.parametrize(("tokens", "cached", "out"), [(39, 0, 8), (120_490, 120_464, 16_384), (10**7, 10**7, 10**6)])
@pytest.mark.parametrize("seconds", [0.03, 12_345.6, None])
def test_the_footer_fits_80_columns(tokens, cached, out, seconds):
    rate = None if seconds is None else 1e6 / seconds
    footer = Reply("", "stop", tokens, cached, out, seconds, rate, rate).footer(tokens + out)
    assert len(footer) <= 80
    assert footer.startswith(f"{tokens:,} tokens in ({cached:,} cached), {out:,} out")
    assert footer.endswith("context 100%")


@pytest.mark.parametrize(
    ("reason", "out", "ending"),
    [
        ("stop", 5, ""),
        ("length", 1024, "cut at max_tokens 1024"),
        ("length", 5, "cut: the context is full"),
        ("abort", 5, "stopped by Ctrl-C"),
        ("repetition", 5, "stopped: repeating itself"),
    ],
)
def test_a_reply_that_is_not_whole_says_why(reason, out, ending):
    assert Reply("", reason, 1, 0, out, None, None, None).ending(1024) == ending


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
    assert chat.session.messages == before
    chat.take("/undo")
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
    other = talk(llm, Session(SamplingParams(), model="other"))
    capsys.readouterr()
    other.take(f"/load {tmp_path}/my session.json")
    assert (other.session.messages, other.session.params) == (chat.session.messages, chat.session.params)
    out, err = capsys.readouterr()
    assert out == f"{printable(chat.replies[-1].text)}\n"
    assert err.endswith("\n> one\n")
    shown = " ".join(err.split())
    assert "1 turn(s) from" in shown
    assert "They were with tiny, not other." in shown
    other.take("two")
    assert texts(chat.sent[-1]) == ["Be brief.", "one", chat.session.messages[1]["content"], "two"]
    assert json.loads((tmp_path / "my session.json").read_text())["messages"] == chat.session.messages
    for text in ("/save", f"/load {tmp_path}/missing"):
        with pytest.raises((ValueError, OSError), match=r"FILE|missing"):
            chat.take(text)


def test_blocks_draws_the_cache(chat, capsys):
    chat.take("one")
    chat.take("two")
    capsys.readouterr()
    chat.take("/blocks")
    shown = capsys.readouterr().err
    num_cached = chat.llm.engine.scheduler.block_manager.num_cached_blocks
    assert f"64 blocks of 4 tokens: 0 used, {num_cached} cached, {64 - num_cached} free" in shown
    assert shown.count("\u2592") == num_cached + 1  # and in the legend
    assert "Request 2 ends: it has as many tokens as it may have." in shown
    assert "step 0" not in shown
    assert "prefix hits" not in shown


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
    raw = talk(llm, raw=True)
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


def test_an_error_of_the_engine_ends_the_reply_and_is_said(chat, llm, monkeypatch, capsys):
    worker = llm.engine.executor.worker
    launch = worker.launch

    def failing(batch):
        if batch.starts and batch.starts[0] + batch.counts[0] > 28:
            raise RuntimeError("the device is gone")
        return launch(batch)

    monkeypatch.setattr(worker, "launch", failing)
    chat.take("where is the cat?")
    assert chat.last.finish_reason == "error"
    assert "ended by an error: RuntimeError: the device is gone" in capsys.readouterr().err
    monkeypatch.undo()
    chat.take("and the dog?")
    assert chat.last.finish_reason == "length"


def test_only_two_interrupts_at_the_prompt_leave(llm, monkeypatch):
    """Not one that comes between a reply and the prompt."""
    lines = iter(["/set seed 3", KeyboardInterrupt(), "/set seed 4", KeyboardInterrupt(), KeyboardInterrupt()])

    class Prompt:
        dumb, typed, why_no_history = True, False, ""

        def read(self):
            line = next(lines)
            if isinstance(line, KeyboardInterrupt):
                raise line
            return line

    def say_once(text, *style):
        if text == "" and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    interrupted = []
    chat = talk(llm)
    monkeypatch.setattr("nanopage.terminal.conversation.Prompt", lambda *arguments: Prompt())
    monkeypatch.setattr("nanopage.terminal.conversation.say", say_once)
    assert chat.run() == 130
    assert interrupted and chat.session.params.seed == 4 and not [*lines]
