"""Prompts of conversations with tools. A chat template without tools, such as the default model's, is given their
descriptions, the calls and the results as text.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from nanopage.text.chat_template import check_final_message, normalize_messages
from nanopage.text.image_parts import take_images
from nanopage.text.reasoning import END_THINK, THINK, knows_reasoning, last_mark
from nanopage.text.tokenizer import Tokenizer

CALL, END_CALL = "<tool_call>", "</tool_call>"
INSTRUCTIONS = """# Tools

You may call functions to help with the user's request. These are their signatures:
<tools>
{tools}
</tools>

To call a function, reply with a JSON object that has its name and its arguments, between these tags:
<tool_call>
{{"name": <name of the function>, "arguments": <object with the arguments>}}
</tool_call>"""


def make_prompt(
    tokenizer: Tokenizer,
    encode: Callable[..., list[int]],
    messages: list[dict],
    tools: list[dict] | None = None,
    **options: Any,
) -> dict:
    """The prompt of a conversation as the engine takes it. Messages may have images (see image_parts.py). Arguments and
    errors are those of `render_chat`.

    Args: encode: the engine's; its errors are raised.
    """
    messages, images = take_images(messages)
    text = render_chat(tokenizer, messages, tools, **options)
    # The template writes the special tokens itself: none is added twice.
    ids = encode(text, add_special_tokens=False)
    begun = last_mark(tokenizer, ids) == THINK
    if begun:  # by the template, or by the message that the model goes on with. What others say must not count.
        own = messages[-1:] if options.get("continue_final_message") else []
        others = json.dumps([messages[: len(messages) - len(own)], tools], default=str)
        if THINK in others:
            plain, described = json.loads(others.replace(END_THINK, "").replace(THINK, ""))
            without = render_chat(tokenizer, [*plain, *own], described, **options)
            begun = last_mark(tokenizer, encode(without, add_special_tokens=False)) == THINK
    thinks = begun or knows_reasoning(tokenizer.template_for(tools is not None, options.get("chat_template")))
    prompt = {"prompt": text, "prompt_token_ids": ids, "reasoning": begun if thinks else None}
    return prompt | {"multi_modal_data": {"image": images}} if images else prompt


def render_chat(tokenizer: Tokenizer, messages: list[dict], tools: list[dict] | None = None, **options: Any) -> str:
    """The conversation as the model was trained to see it.

    Args:
        tools: {"type": "function", "function": {"name", "description", "parameters"}} of each.
        options: further arguments of `Tokenizer.render_chat`.

    Raises: as `Tokenizer.render_chat`.
    """
    template = tokenizer.template_for(tools is not None, options.get("chat_template"))
    if isinstance(template, str) and not reads_tools(template):
        messages = normalize_messages(messages)
        if options.get("continue_final_message"):
            check_final_message(messages)
        messages, tools = with_tools_as_text(messages, tools or []), None
    return tokenizer.render_chat(messages, tools=tools, **options | {"chat_template": template})


def reads_tools(template: str) -> bool:
    """Whether a chat template describes tools itself."""
    return re.search(r"\btools\b", template) is not None


def with_tools_as_text(messages: Sequence[dict], tools: Sequence[dict]) -> list[dict]:
    """Messages for a template without tools: their descriptions in the system message, and calls and results as text.

    Args:
        messages: as `normalize_messages` returns them.
        tools: {"type": "function", "function": {...}}; may be empty.
    """
    plain: list[dict] = []
    for message in messages:
        message = dict(message)
        calls, content = message.pop("tool_calls", []), message["content"]
        for call in calls:
            name, arguments = (call["function"][field] for field in ("name", "arguments"))
            if not isinstance(arguments, str):  # what is no JSON is written as the model has written it
                arguments = json.dumps(arguments, ensure_ascii=False)
            text = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'
            content += f"\n{CALL}\n{text}\n{END_CALL}"
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if plain and plain[-1].get("results"):  # results of one turn are one message
                plain[-1]["content"] += f"\n{content}"
                continue
            message = {"role": "user", "results": True}
        plain.append(message | {"content": content.lstrip("\n") if calls else content})
    for message in plain:
        message.pop("results", None)
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = INSTRUCTIONS.format(tools=lines)
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] += f"\n\n{text}"
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain
