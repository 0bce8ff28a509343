"""Grammars of replies with calls of tools, in the syntax of llguidance (an extension of Lark's)."""

import json
from collections.abc import Sequence

from nanopage.grammar.matcher import WHITESPACE
from nanopage.grammar.schema import without_annotations
from nanopage.grammar.tool_definitions import Tool, ToolChoice
from nanopage.grammar.tool_formats import ToolFormat


def make_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    mark_id: int | None = None,
    body: str | None = None,
) -> str | None:
    """The grammar of a reply; None if the reply may be anything.

    Args:
        parallel: whether there may be several calls.
        mark_id: the id of the token for `tool_format.begin`, if that is a special token.
        body: the grammar of a reply without calls, as `json_value` returns it; None for any text.
    """
    constrained = choice.kind in ("required", "named") or any(tool.strict for tool in tools)
    if choice.kind == "none" or not (constrained or body is not None):
        return None
    if choice.kind == "named":
        tools, parallel = [tool for tool in tools if tool.name == choice.name], False
    begin = "" if tool_format.bare else _quoted(tool_format.begin) if mark_id is None else f"<[{mark_id}]>"
    newline = _quoted("\n") if tool_format.end else ""
    # `rest` follows a mark. `calls` are all calls of a reply.
    if tool_format.named:
        rest = f'"[" call{_repeated(parallel, _quoted(", ") + " call")} "]"'
        calls = f"{begin} rest"
    elif tool_format.separator:
        rest = f"call{_repeated(parallel, _quoted(tool_format.separator + ' ') + ' call')}"
        calls = f"{begin} rest"
    else:
        rest = f"{newline} call {newline} {_quoted(tool_format.end)}"
        calls = f"{begin} rest{_repeated(parallel, f'{newline} {begin} rest')}"
    rules = [_inside(f"inside_{i}", tool, tool_format.key) for i, tool in enumerate(tools)]
    rules += [f"inside: {' | '.join(f'inside_{i}' for i in range(len(tools)))}", 'call: "{" inside', f"rest: {rest}"]
    if choice.kind != "auto":
        rules.append(f"start: {calls}")
    elif body is not None:
        rules += ["start: calls | body", f"calls: {calls}", f"body: {body}"]
    elif tool_format.bare:
        # A call may be anywhere in the text. So a brace followed by a quote always begins a call.
        rules += [
            'start: (TEXT | "{" brace)* ("{" SPACE?)?',
            'brace: inside | OTHER | SPACE? "{" brace',
            r"TEXT: /[^{]+/",
            r"SPACE: /\s+/",
            r'OTHER: /\s*[^\s"{]/',
        ]
    elif mark_id is None:
        # The text before a call ends with the first mark, so that a call follows every mark.
        rules += ["start: (before rest)* TEXT?", f"before[suffix={begin}]: /(.|\\n)*/", r"TEXT: /(.|\n)+/"]
    else:
        rules += ["start: (TEXT? mark rest)* TEXT?", f"mark: {begin}", r"TEXT: /(.|\n)+/"]
    return "%llguidance {}\n" + "\n".join(rules) + "\n"


def _inside(rule: str, tool: Tool, key: str) -> str:
    """A call, without its first brace."""
    begin = f'"name": {json.dumps(tool.name)}, "{key}": '
    schema = dict(tool.schema())
    if tool.parameters is None:
        schema["additionalProperties"] = False
    return f"{rule}: {_quoted(begin)} {rule}_arguments {_quoted('}')}\n{rule}_arguments: {json_value(schema)}"


def json_value(schema: dict, whitespace: bool = True) -> str:
    """The grammar of a value of this JSON schema. Args: whitespace: whether white space is allowed."""
    options = {"whitespace_pattern": WHITESPACE} if whitespace else {"whitespace_flexible": False}
    return f"%json {json.dumps(without_annotations(schema)[0] | {'x-guidance': options})}"


def _repeated(several: bool, what: str) -> str:
    return f" ({what})*" if several else ""


def _quoted(text: str) -> str:
    return json.dumps(text)
