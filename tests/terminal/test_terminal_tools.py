"""Tools in a conversation: calls are shown, confirmed, run and answered. What the model says is scripted."""

import dataclasses

import pytest
from helpers import tiny_model

from nanopage import LLM, SamplingParams
from nanopage.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanopage.terminal.commands import WITH_ALIASES
from nanopage.terminal.conversation import MAX_CALLS, Conversation
from nanopage.terminal.local import LocalModel
from nanopage.terminal.session import Session
from nanopage.terminal.tools import Toolbox
from nanopage.text.tool_prompt import render_chat

pytestmark = pytest.mark.usefixtures("one_thread")

MODULE = '''
ran = []

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    ran.append((a, b))
    return a + b
'''
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("model"))
    return LLM(str(path), device="cpu", max_model_len=1024, num_gpu_blocks_override=300, enforce_eager=True)


@pytest.fixture
def talk(llm, tmp_path, monkeypatch, capsys):
    """Answers a message with scripted replies and typed answers. Returns what was on the screen."""
    (tmp_path / "sums.py").write_text(MODULE)
    typed, replies, sent, shown_special = [], [], [], []
    toolbox = Toolbox(tmp_path / "sums.py", lambda question: (print(question), typed.pop(0))[1])

    def recorded_render(tokenizer, messages, tools):
        sent.append((messages, tools))
        return render_chat(tokenizer, messages, tools)

    def scripted_stream(prompt, params):
        text = replies.pop(0)
        shown_special.append(not params.skip_special_tokens)
        for end in range(1, len(text) + 1):
            ended = "stop" if end == len(text) else None
            completion = CompletionOutput(0, text[:end], [5] * end, finish_reason=ended, delta=text[end - 1])
            ids = prompt["prompt_token_ids"]
            yield RequestOutput("0", None, ids, [completion], ended is not None, RequestMetrics(0.0))

    monkeypatch.setattr("nanopage.terminal.local.render_chat", recorded_render)
    monkeypatch.setattr(llm, "stream", scripted_stream)
    chat = Conversation(
        LocalModel(llm), Session(SamplingParams(temperature=0)), WITH_ALIASES, raw=False, plain=True, toolbox=toolbox
    )

    def talk(message, script, answers):
        typed[:], replies[:] = answers, script
        chat.take(message)
        assert not typed and not replies
        shown = capsys.readouterr()
        return shown.out + shown.err

    talk.chat, talk.sent, talk.shown_special = chat, sent, shown_special
    talk.ran = toolbox.functions["add"].__globals__["ran"]
    return talk


def test_a_call_runs_after_it_was_confirmed(talk):
    shown = talk("2 and 3?", [f"I add.\n{CALL}", "It is 5."], ["y"])
    assert "add(a=2, b=3)" in shown and "Run it? [y/N]" in shown and "-> 5" in shown
    assert talk.ran == [(2, 3)]
    assert talk.shown_special == [True, True]  # they may be marks of calls
    user, assistant = talk.chat.session.messages
    assert (user["content"], assistant["content"]) == ("2 and 3?", "It is 5.")
    call, result = assistant["steps"]
    assert (call["content"], call["tool_calls"][0]["function"]["arguments"]) == ("I add.", {"a": 2, "b": 3})
    assert (result["role"], result["content"]) == ("tool", "5")
    prompt, (tool,) = talk.sent[-1]
    assert [message["role"] for message in prompt] == ["user", "assistant", "tool"]
    assert tool["function"]["name"] == "add"
    talk("Thanks", ["Welcome."], [])
    assert [message["role"] for message in talk.sent[-1][0]] == ["user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize("answer", ["", "n", "no", "yess"])
def test_nothing_runs_without_a_yes(talk, answer):
    assert "not run" in talk("2 and 3?", [CALL, "As you wish."], [answer])
    assert talk.ran == [] and "did not allow" in talk.chat.session.messages[-1]["steps"][1]["content"]


@pytest.mark.parametrize("arguments", ['{"a": 2}', '{"a": 2, "b": }', '{"a": 2, "b": 3, "c": 4}'])
def test_a_wrong_call_is_not_run_and_the_model_is_told(talk, arguments):
    talk("2 and 3?", [f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>', "Oh."], [])
    assert talk.ran == [] and "the arguments are" in talk.chat.session.messages[-1]["steps"][1]["content"]


def test_calls_do_not_go_on_for_ever(talk):
    talk("2 and 3?", [CALL] * MAX_CALLS + ["Enough."], ["y"] * MAX_CALLS)
    assert len(talk.ran) == MAX_CALLS and talk.chat.session.messages[-1]["content"] == "Enough."


def test_ctrl_c_instead_of_an_answer_leaves_the_conversation_as_it_was(talk, monkeypatch):
    def interrupted(question):
        raise KeyboardInterrupt

    talk("Hello", ["Hi."], [])
    before = [dict(message) for message in talk.chat.session.messages]
    monkeypatch.setattr(talk.chat.toolbox, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        talk("2 and 3?", [CALL], [])
    assert talk.chat.session.messages == before and talk.ran == []


def test_a_conversation_with_calls_is_saved_and_loaded(talk, tmp_path):
    talk("2 and 3?", [CALL, "5"], ["yes"])
    file = tmp_path / "saved.json"
    talk.chat.session.save(file)
    loaded = Session(SamplingParams())
    loaded.load(file)
    assert loaded.messages == talk.chat.session.messages
    file.write_text(file.read_text().replace('"role": "tool"', '"role": "user"'))
    with pytest.raises(ValueError, match="steps"):
        dataclasses.replace(loaded).load(file)


def test_continue_keeps_the_calls(talk):
    talk("2 and 3?", [CALL, "It is"], ["y"])
    steps = talk.chat.session.messages[-1]["steps"]
    talk.chat.last = None  # as after /load
    talk("/continue", [" 5."], [])
    assert talk.chat.session.messages[-1] == {"role": "assistant", "content": "It is 5.", "steps": steps}
    assert [message["role"] for message in talk.sent[-1][0]] == ["user", "assistant", "tool"]
