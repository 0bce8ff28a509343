"""tool_functions.py and tool_prompt.py: Python functions as tools, and conversations with tools as text."""

import json

import pytest

from nanopage.grammar.tool_functions import MAX_RESULT, describe_function, load_functions, read_arguments, run_function
from nanopage.text.tokenizer import Tokenizer
from nanopage.text.tool_prompt import render_chat

MODULE = '''
from dataclasses import dataclass
from json import dumps  # from elsewhere: no tool

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b

def _hidden() -> None:
    """No tool."""
'''


@pytest.fixture
def add(tmp_path):
    (tmp_path / "sums.py").write_text(MODULE)
    functions = load_functions(tmp_path / "sums.py")
    assert list(functions) == ["add"]
    return functions["add"]


def test_docstring_and_hints_become_the_schema(add):
    tool = describe_function(add)
    assert (tool.name, tool.description) == ("add", "Add two numbers.")
    assert tool.schema()["required"] == ["a"]
    assert tool.schema()["properties"]["b"] == {"type": "integer", "description": "The second one."}


def test_a_function_without_hints_or_descriptions_is_refused():
    def no_hint(a):
        """Hm.

        Args:
            a: A thing.
        """

    def no_description(a: int):
        """Hm."""

    for function in (no_hint, no_description, lambda: 1):
        with pytest.raises(ValueError, match=f"^{function.__name__}"):
            describe_function(function)


def test_files_that_are_no_modules_are_refused(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "a.txt").write_text("x = 1")
    for name, error in (("none.py", FileNotFoundError), ("empty.py", ValueError), ("a.txt", ValueError)):
        with pytest.raises(error, match=name):
            load_functions(tmp_path / name)


def test_arguments_are_checked_before_a_call(add):
    assert read_arguments(add, '{"a": 2}') == {"a": 2}
    for arguments, message in (("{", "not JSON"), ("[1]", "no object"), ("{}", "'a'"), ('{"a": 1, "c": 2}', "'c'")):
        with pytest.raises(ValueError, match=message):
            read_arguments(add, arguments)


def test_results_and_exceptions_become_text(add):
    assert run_function(add, {"a": 2}) == "3"
    assert run_function(lambda: "é", {}) == "é"
    assert run_function(lambda: {"x": {1}}, {}) == '{"x": "{1}"}'
    assert run_function(lambda: 1 / 0, {}) == "ZeroDivisionError: division by zero"
    assert run_function(lambda: "\ud83d", {}).startswith("UnicodeEncodeError")
    assert len(run_function(lambda: "x" * 10**6, {})) == MAX_RESULT + len(" ... (cut)")


def test_a_template_without_tools_gets_them_as_text(default_model):
    tokenizer = Tokenizer(default_model)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "2 and 1?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "4"},
    ]
    text = render_chat(tokenizer, messages, [tool])
    assert text.count(json.dumps(tool)) == 1 and "named SmolLM" not in text
    block = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert f"<|im_start|>assistant\nI add.\n{block}\n{block}<|im_end|>" in text
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert "<|im_start|>system\nBe brief.\n\n# Tools" in render_chat(tokenizer, system, [tool])
    assert render_chat(tokenizer, messages[:1]) == tokenizer.render_chat(messages[:1])


def test_a_template_with_tools_gets_them_itself(default_model):
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    )
    template += "{% endfor %}{{ tools | length }}"
    call = {"function": {"name": "add", "arguments": "{}"}}
    messages = [{"role": "user", "content": "2?"}, {"role": "assistant", "tool_calls": [call]}]
    assert render_chat(Tokenizer(default_model), messages, [{}, {}], chat_template=template) == "2?add2"
