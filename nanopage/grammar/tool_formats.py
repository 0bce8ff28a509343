"""How models write calls of tools.

    hermes       <tool_call>                                           Hermes, Qwen2.5, Qwen3
                 {"name": "find", "arguments": {"city": "Oslo"}}
                 </tool_call>
    llama3_json  {"name": "find", "parameters": {"city": "Oslo"}}      Llama 3.1, 3.2, 3.3
    mistral      [TOOL_CALLS][{"name": "find", "arguments": {...}}]    Mistral; newer ones: [TOOL_CALLS]find[ARGS]{...}

A chat template shows which of these forms a model was trained on. A model whose template has no tools is told to write
hermes (see text/tool_prompt.py).
"""

import secrets
import string
from dataclasses import dataclass

from nanopage.text.tool_prompt import CALL, END_CALL, reads_tools


@dataclass(frozen=True)
class ToolFormat:
    """One form of calls.

    Args:
        name: as `--tool-call-parser` takes it.
        begin: the mark before calls.
        end: the mark after each call.
        separator: the text between several calls after one mark.
        key: the key of the arguments.
        bare: whether a reply may be a call without the mark.
        named: whether the mark may precede a list of calls, or a name and an object of arguments.
        id_prefix, id_length: the form of the ids of calls. The length does not count the prefix.
    """

    name: str
    begin: str
    end: str = ""
    separator: str = ""
    key: str = "arguments"
    bare: bool = False
    named: bool = False
    id_prefix: str = "call_"
    id_length: int = 24

    def make_id(self) -> str:
        """The id of a new call."""
        return self.id_prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self.id_length))


HERMES = ToolFormat("hermes", CALL, END_CALL)
LLAMA3_JSON = ToolFormat("llama3_json", "<|python_tag|>", separator=";", key="parameters", bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", named=True, id_prefix="", id_length=9)  # its templates demand 9
FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL)}
_ID_CHARACTERS = string.ascii_letters + string.digits


def find_format(template: str, name: str | None = None) -> ToolFormat:
    """The form of the calls of a model.

    Args:
        template: its chat template.
        name: the name of a form to use anyway.

    Raises: ValueError if the template has another form.
    """
    if name is not None:
        return FORMATS[name]
    if not reads_tools(template):
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return LLAMA3_JSON
    raise ValueError(
        f"tools: the model's chat template has another form of calls than {', '.join(FORMATS)}; if you know that the "
        "model writes one of these, set --tool-call-parser"
    )
