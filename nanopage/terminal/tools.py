"""Tools in a conversation: each call is shown, and runs only after the user has agreed."""

import json
from collections.abc import Callable
from pathlib import Path

from nanopage.grammar.tool_definitions import Tool
from nanopage.grammar.tool_functions import describe_function, load_functions, read_arguments, run_function
from nanopage.grammar.tool_pieces import ToolCall
from nanopage.terminal.text import say

MAX_SHOWN = 500  # characters of a result on the screen; the model gets the whole result


class Toolbox:
    """The functions of a file, which the model may call.

    Args: ask: shows a question and returns the typed answer.
    Raises: as `load_functions` and `describe_function`.
    """

    def __init__(self, file: Path, ask: Callable[[str], str]):
        self.functions = load_functions(file)
        self.tools: list[Tool] = [describe_function(function) for function in self.functions.values()]
        self.ask = ask

    def describe(self) -> list[dict]:
        """The tools as chat templates take them."""
        return [tool.describe() for tool in self.tools]

    def answer(self, text: str, calls: list[tuple[str, ToolCall]]) -> list[dict]:
        """Run the calls of a reply, if the user agrees to each. Returns the messages to send after it: the reply
        itself, and the results.

        Args:
            text: the model's text besides the calls.
            calls: with their ids.

        Raises: KeyboardInterrupt if the user presses Ctrl-C instead.
        """
        shown, results = [], []
        for call_id, call in calls:
            result, arguments = self._run(call)
            shown.append({"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
            results.append({"role": "tool", "tool_call_id": call_id, "name": call.name, "content": result})
        return [{"role": "assistant", "content": text, "tool_calls": shown}, *results]

    def _run(self, call: ToolCall) -> tuple[str, dict]:
        try:
            if (function := self.functions.get(call.name)) is None:  # only a server may let it through
                raise ValueError("there is no such function")
            arguments = read_arguments(function, call.arguments)
        except ValueError as error:
            say(f"The model calls {call.name} with {call.arguments:.{MAX_SHOWN}}: {error}", "yellow")
            return str(error), {}
        listed = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
        say(f"The model calls {call.name}({listed})")
        if self.ask("Run it? [y/N] ").strip().lower() not in ("y", "yes"):
            say("not run")
            return "The user did not allow this call.", arguments
        result = run_function(function, arguments)
        say(f"-> {result[:MAX_SHOWN]}{' ...' if len(result) > MAX_SHOWN else ''}")
        return result, arguments
