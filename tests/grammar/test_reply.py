"""nanopage/grammar/tool_reply.py: every form of a reply, whole and in random pieces."""

import json
import random

import pytest

from nanopage.grammar import tool_reply as reply
from nanopage.grammar.tool_formats import FORMATS, HERMES, LLAMA3_JSON, MISTRAL
from nanopage.grammar.tool_pieces import Arguments, Call, Content, Reasoning, Reply, ToolCall
from nanopage.grammar.tool_reply import ReplyReader

NAMES = ["find", "now", "a.b-c"]
ARGUMENTS = '{"city": "Os\\"}lo", "n": [1, {"x": "]"}], "é": "☃"}'
FIND, NOW = ToolCall("find", ARGUMENTS), ToolCall("now", "{}")
OBJECT = f'{{"name": "find", "arguments": {ARGUMENTS}}}'
BARE = f'{{"name": "find", "parameters": {ARGUMENTS}}}'

CASES = [
    (None, "No tools: <tool_call>{}</tool_call> ", Reply("", "No tools: <tool_call>{}</tool_call> ")),
    (HERMES, "", Reply()),
    (HERMES, " \n a ", Reply("", " \n a ")),
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool_call>", Reply("", "", [FIND])),
    (HERMES, f"I look.\n<tool_call>\n{OBJECT}\n</tool_call>\n\n", Reply("", "I look.", [FIND])),
    (HERMES, f"<tool_call>{OBJECT}</tool_call> So.  ", Reply("", " So.  ", [FIND])),
    (HERMES, f'<tool_call>{OBJECT}</tool_call>\n<tool_call>{{"name":"now"}}</tool_call>', Reply("", "", [FIND, NOW])),
    (HERMES, f"<tool_call>\n{OBJECT}\n", Reply("", "", [FIND])),  # not closed
    (HERMES, f"<tool_call>\n{OBJECT}\n</tool", Reply("", "", [FIND])),
    (HERMES, f"<tool_call>{OBJECT} or not", Reply("", " or not", [FIND])),
    (HERMES, '<tool_call>{"name": "find", "arguments": {"ci', Reply("", "", [ToolCall("find", '{"ci')])),  # cut
    (HERMES, '<tool_call>{"name": "find", "arguments": {"a": "\\', Reply("", "", [ToolCall("find", '{"a": "\\')])),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', Reply("", "", [NOW])),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', Reply("", "", [NOW])),
    (HERMES, '<tool_call>{"arguments": null, "name": "now"}</tool_call>', Reply("", "", [NOW])),
    (HERMES, '<tool_call>{"id": "1", "x": [{"y": "}"}, 2], "name": "now", "z": {}}</tool_call>', Reply("", "", [NOW])),
    (
        HERMES,
        '<tool_call> { "name" : "now" , "parameters" : { } } </tool_call>',
        Reply("", "", [ToolCall("now", "{ }")]),
    ),
    (HERMES, f"<<tool_call>{{}}<tool_call>no<tool_call>{OBJECT}", Reply("", "<<tool_call>{}<tool_call>no", [FIND])),
    (LLAMA3_JSON, BARE, Reply("", "", [FIND])),
    (LLAMA3_JSON, f'\n{BARE}; {{"name": "now", "parameters": {{}}}}\n', Reply("", "", [FIND, NOW])),
    (LLAMA3_JSON, f"<|python_tag|>{BARE}", Reply("", "", [FIND])),
    (LLAMA3_JSON, f'{{"type": "function", {BARE[1:]}', Reply("", "", [FIND])),
    (LLAMA3_JSON, f"{BARE} Done.", Reply("", " Done.", [FIND])),
    (LLAMA3_JSON, '{"name": "Ada", "born": 1815}', Reply("", '{"name": "Ada", "born": 1815}')),
    (LLAMA3_JSON, "<|python_tag|>print(1)", Reply("", "<|python_tag|>print(1)")),
    (MISTRAL, f'[TOOL_CALLS][{OBJECT}, {{"name": "now", "arguments": {{}}}}]', Reply("", "", [FIND, NOW])),
    (MISTRAL, f"Well. [TOOL_CALLS] [{OBJECT}]", Reply("", "Well.", [FIND])),
    (MISTRAL, f"[TOOL_CALLS]find[ARGS]{ARGUMENTS}[TOOL_CALLS]now{{}}", Reply("", "", [FIND, NOW])),
    (MISTRAL, f"[TOOL_CALLS]find[CALL_ID]123456789[ARGS]{ARGUMENTS}", Reply("", "", [FIND])),
    (MISTRAL, "[TOOL_CALLS]find[x]{}", Reply("", "[TOOL_CALLS]find[x]{}")),
    (MISTRAL, "[TOOL_CALLS][]", Reply("", "[TOOL_CALLS][]")),
]
REVERSED = f'{{"arguments": {ARGUMENTS}, "name": "find"}}'
IN_STRING = f'{{"name": "find", "arguments": {json.dumps(ARGUMENTS)}}}'
NOW_BARE = '{"name": "now", "parameters": {}}'
CODE = '```py\nx = {"a": [1]}\n``` or `{}`, [x](y) {'
LONG = ToolCall("find", json.dumps({"text": "x" * 3000}))
CASES += [
    (HERMES, f"<tool_call>\n{REVERSED}\n</tool_call>", Reply("", "", [FIND])),
    (HERMES, f"<tool_call>{IN_STRING}</tool_call>", Reply("", "", [FIND])),
    (HERMES, f'<tool_call>{{"arguments": {json.dumps(ARGUMENTS)}, "name": "find"}}', Reply("", "", [FIND])),
    (HERMES, '<tool_call>{"name": "now", "arguments": " "}</tool_call>', Reply("", "", [NOW])),
    (HERMES, f'<tool_call>{{"parameters": {LONG.arguments}, "name": "find"}}</tool_call>', Reply("", "", [LONG])),
    (HERMES, f"<tool_call>{OBJECT}\n<tool_call>{REVERSED}</tool_call>", Reply("", "", [FIND, FIND])),  # one not closed
    (HERMES, f"<tool_call>{OBJECT}\n{OBJECT}\n</tool_call>", Reply("", "", [FIND, FIND])),
    (HERMES, f"<tool_call>[{OBJECT}, {REVERSED}]</tool_call>", Reply("", "", [FIND, FIND])),
    (HERMES, f"Yes:\n```xml\n<tool_call>{OBJECT}</tool_call>\n```\nOk", Reply("", "Yes:\nOk", [FIND])),
    (HERMES, f"<tool_call>\n```json\n{OBJECT}\n```\n</tool_call>\n", Reply("", "", [FIND])),
    (HERMES, f"```json\n{OBJECT}\n```", Reply("", f"```json\n{OBJECT}\n```")),  # without the mark
    (LLAMA3_JSON, f"{BARE}\n{NOW_BARE}", Reply("", "", [FIND, NOW])),
    (LLAMA3_JSON, f"{BARE} ;\n\n{NOW_BARE};", Reply("", "", [FIND, NOW])),
    (LLAMA3_JSON, f"{BARE}{NOW_BARE}\nSo; ", Reply("", "\nSo; ", [FIND, NOW])),
    (LLAMA3_JSON, f"<|python_tag|>{BARE}\n<|python_tag|>{NOW_BARE}", Reply("", "", [FIND, NOW])),
    (LLAMA3_JSON, f"[{BARE}, {NOW_BARE}]", Reply("", "", [FIND, NOW])),
    (LLAMA3_JSON, f"Here: {BARE}", Reply("", "Here:", [FIND])),
    (LLAMA3_JSON, f"I look.\n\n{BARE}\n{NOW_BARE} Done.", Reply("", "I look. Done.", [FIND, NOW])),
    (LLAMA3_JSON, f"I look. ```json\n{BARE}\n```", Reply("", "I look.", [FIND])),
    (LLAMA3_JSON, OBJECT, Reply("", "", [FIND])),
    (LLAMA3_JSON, REVERSED, Reply("", "", [FIND])),
    (LLAMA3_JSON, f'{{"type": "function", {REVERSED[1:]}', Reply("", "", [FIND])),
    (LLAMA3_JSON, IN_STRING, Reply("", "", [FIND])),
    (LLAMA3_JSON, f'{{"a": [{{"b": 1}}]}} and {BARE}', Reply("", '{"a": [{"b": 1}]} and', [FIND])),
    (LLAMA3_JSON, 'The call {"name": "now"} is one', Reply("", 'The call {"name": "now"} is one')),
    (
        LLAMA3_JSON,
        '```py\nx = {"a": [1]}\n``` or `{}`, [x](y) {',
        Reply("", '```py\nx = {"a": [1]}\n``` or `{}`, [x](y) {'),
    ),
    (MISTRAL, f"[TOOL_CALLS][{REVERSED}, {IN_STRING}]", Reply("", "", [FIND, FIND])),
    (MISTRAL, f"[TOOL_CALLS]{OBJECT}", Reply("", "", [FIND])),
]
NOT_CALLS = [  # in hermes' form
    "<tool_call></tool_call>",
    "<tool_call>find</tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "find", "arguments": "city"}</tool_call>',
    '<tool_call>{"name": "find", "arguments": "[1]"}</tool_call>',
    '<tool_call>{"arguments": {"a": }, "name": "find"}</tool_call>',
    '<tool_call>{"arguments": {"a": "<tool_call>"}, "name": "other"}</tool_call>',
    '<tool_call>{"arguments": {}, "name": "fi',
    '<tool_call>{"name": "find", "arguments": "{',
    '<tool_call>{"name": "find" "arguments": {}}</tool_call>',
    '<tool_call>{"name": "find',
    '<tool_call>{"name": "fi\\u006ed"}',
    "<tool_call" + " " * 2000 + ">",
    '<tool_call>{"id": "' + "x" * 2000 + '", "name": "now"}</tool_call>',
    "<tool_call>" * 300,
]


def read(tool_format, text, cuts=(), **options):
    reader, pieces = ReplyReader(tool_format, NAMES, **options), []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += reader.feed(text[begin:end])
    pieces += reader.end()
    joined = Reply()
    for piece in pieces:
        assert isinstance(piece, Call) or piece.text, "an empty piece"
        joined.add(piece)
    assert joined == reader.whole
    return joined


def check_in_pieces(expected, tool_format, text, **options):
    assert read(tool_format, text, **options) == expected
    assert read(tool_format, text, range(1, len(text)), **options) == expected
    generator = random.Random(text)
    for _ in range(50):
        cuts = sorted(generator.choices(range(len(text) + 1), k=generator.randint(1, 12)))
        assert read(tool_format, text, cuts, **options) == expected


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
def test_pieces_add_up_to_the_whole(tool_format, text, expected):
    check_in_pieces(expected, tool_format, text)


@pytest.mark.parametrize("text", NOT_CALLS, ids=[text[:50] for text in NOT_CALLS])
def test_what_is_no_call_is_content(text):
    check_in_pieces(Reply("", text), HERMES, text)
    check_in_pieces(Reply("", text, [NOW]), HERMES, f'{text} <tool_call>{{"name": "now"}}')


def test_the_work_for_what_is_no_call_is_bounded(monkeypatch):
    read = []
    checked = ReplyReader._checked
    monkeypatch.setattr(ReplyReader, "_checked", lambda self, *args: read.append(1) or checked(self, *args))
    monkeypatch.setattr(reply, "MAX_ARGUMENTS", 4000)
    monkeypatch.setattr(reply, "MAX_READ_AGAIN", 20_000)
    text = '<tool_call>{"arguments": {"a": "' * 300
    reader = ReplyReader(HERMES, NAMES)
    pieces = reader.feed(text) + reader.end()
    assert "".join(piece.text for piece in pieces) == text and len(read) < len(text) + 24_000


def test_arguments_come_as_they_are_written():
    reader = ReplyReader(HERMES, NAMES)
    assert reader.feed('Hm.<tool_call>\n{"name": "fi') == [Content("Hm.")]
    assert reader.feed('nd", "argu') == []
    assert reader.feed('ments": {"a') == [Call(0, "find"), Arguments(0, '{"a')]
    assert reader.feed('": 1}}') == [Arguments(0, '": 1}')]
    assert reader.feed("\n</tool_call>\n") == reader.end() == []


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=list(FORMATS))
def test_random_arguments_in_every_form(tool_format):
    generator = random.Random(0)

    def value(depth):
        kind = generator.choice("snlbo" if depth else "o")
        if kind == "o":
            return {random_text(): value(depth + 1) for _ in range(generator.randint(0, 3 // (depth + 1)))}
        if kind == "l":
            return [value(depth + 1) for _ in range(generator.randint(0, 3 // depth))]
        return {"s": random_text(), "n": generator.random(), "b": None}[kind]

    def random_text():
        return "".join(generator.choices('ab"\\{}[]<>/,:é☃ \n', k=generator.randint(0, 6)))

    for _ in range(100):
        calls = [ToolCall(generator.choice(NAMES), json.dumps(value(0))) for _ in range(generator.randint(1, 3))]
        objects = [f'{{"name": "{call.name}", "{tool_format.key}": {call.arguments}}}' for call in calls]
        text = {
            "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
            "llama3_json": "; ".join(objects),
            "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        }[tool_format.name]
        cuts = sorted(generator.choices(range(len(text)), k=5))
        assert read(tool_format, text, cuts) == Reply("", "", calls)
        assert read(tool_format, text, cuts, parallel=False) == Reply("", "", calls[:1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</th </think>\n\nHi", Reply("a</th ", "Hi")),
        ("\n<think>a", Reply("a")),
        ("<think></think>", Reply()),
        ("<think>a</think> ", Reply("a")),
        ("Hi <think>a</think>", Reply("", "Hi <think>a</think>")),
        ("<thin", Reply("", "<thin")),
        (f"<tool_call>{OBJECT}</tool_call>", Reply("", "", [FIND])),
        (f"<think>{OBJECT}</think>\n<tool_call>{OBJECT}</tool_call>", Reply(OBJECT, "", [FIND])),
        (f"<think><tool_call>{OBJECT}</tool_call></think>x", Reply(f"<tool_call>{OBJECT}</tool_call>", "x")),
    ],
)
def test_reasoning_comes_first(text, expected):
    check_in_pieces(expected, HERMES, text, reasoning=False)
    if text.startswith("<think>"):
        check_in_pieces(expected, HERMES, text.removeprefix("<think>"), reasoning=True)


def test_reasoning_streams():
    reader = ReplyReader(None, (), reasoning=False)
    assert reader.feed("<think>") == []
    assert reader.feed("one two</") == [Reasoning("one two")]
    assert reader.feed("b> three") == [Reasoning("</b> three")]
    assert reader.feed("</think>\n\nHi ") == [Content("Hi ")]


def test_without_reasoning_the_marks_are_content():
    assert read(HERMES, "<think>a</think>b") == Reply("", "<think>a</think>b")
