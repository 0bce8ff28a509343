"""`LLM.read_replies`: the reasoning, the content and the calls of tools in what a model has written."""

from typing import Protocol

from nanopage.grammar.tool_definitions import read_tools
from nanopage.grammar.tool_formats import find_format
from nanopage.grammar.tool_pieces import Reply
from nanopage.grammar.tool_reply import ReplyReader
from nanopage.outputs import RequestOutput
from nanopage.text.reasoning import THINK, knows_reasoning, last_mark
from nanopage.text.tokenizer import Tokenizer


class HasTokenizer(Protocol):
    def get_tokenizer(self) -> Tokenizer | None: ...


def read_replies(llm: HasTokenizer, output: RequestOutput, tools: list[dict] | None = None) -> list[Reply]:
    """The reasoning, the content and the calls of each completion of a conversation.

    Args:
        output: an output of `chat` or `stream`. If the model's marks of calls are special tokens, like Mistral's, the
            parameters must have skip_special_tokens=False.
        tools: the tools that the model was given, as {"type": "function", "function": {...}}.

    Raises: ValueError, TypeError for tools that are not valid, or calls in an unknown form.
    """
    tokenizer = llm.get_tokenizer()
    template = "" if tokenizer is None else tokenizer.template_for(bool(tools)) or ""
    tool_format = find_format(template) if tools else None
    names = [tool.name for tool in read_tools(tools)] if tools else []
    begun = tokenizer is not None and last_mark(tokenizer, output.prompt_token_ids) == THINK
    reasoning = begun if begun or knows_reasoning(template) else None
    replies = []
    for completion in output.outputs:
        reader = ReplyReader(tool_format, names, reasoning=reasoning)
        reader.feed(completion.text)
        reader.end()
        replies.append(reader.whole)
    return replies
