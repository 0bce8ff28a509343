"""nanopage/grammar/tool_grammar.py and tool_definitions.py: what a reply may be, and which definitions are refused."""

import json

import pytest

from nanopage.grammar.structured import Grammars
from nanopage.grammar.tool_definitions import Tool, ToolChoice, read_tool_choice, read_tools
from nanopage.grammar.tool_formats import FORMATS, HERMES, LLAMA3_JSON, MISTRAL, find_format
from nanopage.grammar.tool_grammar import json_value, make_grammar
from nanopage.grammar.tool_reply import ReplyReader
from nanopage.params import StructuredOutputsParams
from nanopage.text.tokenizer import Tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("find", "Finds a city", CITY, strict=True), Tool("now")]
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return Tokenizer(default_model)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 49152, [EOS])


def written(tool_format, *calls):
    objects = [f'{{"name": "{name}", "{tool_format.key}": {arguments}}}' for name, arguments in calls]
    return {
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
    }[tool_format.name]


def is_allowed(grammars, tokenizer, grammar, text):
    mask = grammars.compile(StructuredOutputsParams(grammar=grammar)).make_mask([])
    output = []
    for token_id in [*tokenizer.encode(text, add_special_tokens=False), EOS]:
        if not mask.allowed(output)[token_id // 8] >> token_id % 8 & 1:
            return False
        output.append(token_id)
    return True


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("kind", ["required", "named", "auto"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_grammar_allows_what_the_reader_finds(grammars, tokenizer, tool_format, kind, parallel):
    choice = ToolChoice(kind, "find" if kind == "named" else None)
    grammar = make_grammar(tool_format, TOOLS, choice, parallel)
    one = written(tool_format, ("find", '{"city": "Oslo"}'))
    other = written(tool_format, ("now", "{}"))
    both = written(tool_format, ("find", '{"city": "Oslo"}'), ("now", "{}"))
    for text, expected in (
        (one, True),
        (other, kind != "named"),
        ("Hello!", kind == "auto"),
        (written(tool_format, ("find", '{"town": "Oslo"}')), False),
        (written(tool_format, ("find", "{}")), False),
        (written(tool_format, ("other", "{}")), False),
        (written(tool_format, ("now", '{"a": 1}')), False),
        (one[:-3], False),
    ):
        assert is_allowed(grammars, tokenizer, grammar, text) == expected, text
    if kind != "auto":
        assert is_allowed(grammars, tokenizer, grammar, both) == (parallel and kind == "required")
    reader = ReplyReader(tool_format, [tool.name for tool in TOOLS])
    reader.feed(both)
    assert [call.name for call in reader.whole.calls] == ["find", "now"] and not reader.whole.content


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=list(FORMATS))
def test_a_call_behind_text_follows_its_schema(grammars, tokenizer, tool_format):
    grammar = make_grammar(tool_format, TOOLS, ToolChoice("auto"), True)
    for arguments, expected in (('{"city": "Oslo"}', True), ('{"town": "Oslo"}', False)):
        text = "I look it up.\n" + written(tool_format, ("find", arguments))
        assert is_allowed(grammars, tokenizer, grammar, text) == expected


def test_with_a_strict_tool_no_call_behind_text_escapes_its_schema(grammars, tokenizer):
    grammar = make_grammar(LLAMA3_JSON, TOOLS, ToolChoice("auto"), True)
    wrong = '"parameters": {"town": 1}'
    for text, expected in (
        ("Braces: {a} { b } {{c}} {} {1: 2} {", True),
        ('So:\n{"name": "now", "parameters": {}}\n\n{"name": "find", "parameters": {"city": "Oslo"}} {x', True),
        (f'So: {{"name": "find", {wrong}}}', False),
        (f'So: {{ "name": "find", {wrong}}}', False),
        (f'So: {{{{"name": "find", {wrong}}}', False),
        (f'So: {{ {{\n"name": "find", {wrong}}}', False),
        (f'So: {{{wrong}, "name": "find"}}', False),
        (f'[{{"name": "find", {wrong}}}]', False),
    ):
        assert is_allowed(grammars, tokenizer, grammar, text) == expected, text


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=list(FORMATS))
def test_a_reply_is_a_call_or_in_its_form(grammars, tokenizer, tool_format):
    body = json_value({"type": "array", "items": {"type": "integer"}})
    grammar = make_grammar(tool_format, [Tool("now")], ToolChoice("auto"), True, None, body)
    for text, expected in ((written(tool_format, ("now", "{}")), True), ("[1, 2]", True), ("Hello", False)):
        assert is_allowed(grammars, tokenizer, grammar, text) == expected


def test_without_a_constraint_there_is_no_grammar():
    assert make_grammar(HERMES, [Tool("now")], ToolChoice("auto"), True) is None
    assert make_grammar(HERMES, TOOLS, ToolChoice("none"), True) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}},
        {"type": "object", "properties": {"a": {"type": "strin"}}},
        {"type": "object", "properties": {"a": {"enum": [str(i) * 20 for i in range(40_000)]}}},
        {"type": "object", "properties": {"a": {"anyOf": []}}, "required": ["a"]},
    ],
    ids=["missing $ref", "unknown type", "huge enum", "unsatisfiable"],
)
def test_schemas_that_cannot_be_compiled_are_refused(grammars, schema):
    grammar = make_grammar(HERMES, [Tool("f", "", schema)], ToolChoice("required"), True)
    with pytest.raises(ValueError, match=r"structured_outputs\.grammar"):
        grammars.compile(StructuredOutputsParams(grammar=grammar)).make_mask([])


def test_a_recursive_schema_is_followed(grammars, tokenizer):
    schema = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    grammar = make_grammar(HERMES, [Tool("f", "", schema)], ToolChoice("required"), True)
    deep = '{"child": {"child": {}}}'
    assert is_allowed(grammars, tokenizer, grammar, written(HERMES, ("f", deep)))
    assert not is_allowed(grammars, tokenizer, grammar, written(HERMES, ("f", deep.replace("{}", "5"))))


def function(**fields):
    return {"type": "function", "function": {"name": "f"} | fields}


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ("f", "tools"),
        ([], "tools"),
        ([function()] * 129, "tools"),
        (["f"], r"tools\[0\]"),
        ([{"type": "web_search"}], r"tools\[0\].type"),
        ([{"type": "function"}], r"tools\[0\].function"),
        ([function(), function()], r"tools\[1\].function.name"),
        ([function(name="")], r"tools\[0\].function.name"),
        ([function(name="a b")], r"tools\[0\].function.name"),
        ([function(name="a" * 129)], r"tools\[0\].function.name"),
        ([function(name="a\n")], r"tools\[0\].function.name"),
        ([function(description=5)], r"tools\[0\].function.description"),
        ([function(strict="yes")], r"tools\[0\].function.strict"),
        ([function(parameters="x")], r"tools\[0\].function.parameters"),
        ([function(parameters={"type": "string"})], r"tools\[0\].function.parameters.type"),
    ],
)
def test_a_wrong_definition_is_named(tools, place):
    with pytest.raises((ValueError, TypeError), match=f"^{place}[: ]"):
        read_tools(tools)


def test_choices():
    assert read_tool_choice(None, TOOLS) == read_tool_choice("auto", TOOLS) == ToolChoice("auto")
    assert read_tool_choice(None, []) == read_tool_choice("auto", []) == ToolChoice("none")
    assert read_tool_choice({"type": "function", "function": {"name": "now"}}, TOOLS) == ToolChoice("named", "now")
    for value in ("any", "required", 5, {"type": "function"}, {"type": "function", "function": {"name": "x"}}):
        with pytest.raises((ValueError, TypeError), match=r"^tool_choice"):
            read_tool_choice(value, [] if value == "required" else TOOLS)


def test_the_template_shows_the_form():
    assert find_format("{{ messages }}") is HERMES  # which is told about tools as text
    assert find_format("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert find_format("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}") is MISTRAL
    assert find_format('{{ tools }}{"name": function name, "parameters": dictionary of argument name}') is LLAMA3_JSON
    for template in ("{{ tools }}", "{{ tools }}<tool_call><function=example>"):
        with pytest.raises(ValueError, match="--tool-call-parser"):
            find_format(template)
        assert find_format(template, "mistral") is MISTRAL


def test_ids_are_those_that_templates_take():
    assert len({MISTRAL.make_id() for _ in range(100)}) == 100 and len(MISTRAL.make_id()) == 9
    assert HERMES.make_id().startswith("call_") and json.dumps(HERMES.make_id()).isascii()
