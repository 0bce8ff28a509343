"""The conversation: messages, replies, and what begins with a slash."""

import bisect
import dataclasses
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from nanopage.llm import LLM
from terminal.prompt import Prompt, unquoted
from terminal.reply import Reply, generate, shows_markdown, stderr
from terminal.session import SETTINGS, Session, nearest, state_directory

WARN_AT = 0.8  # of the context
RULE = (
    "when the context is full the oldest turns are left out, whole, until a quarter of it is free; "
    "the system message stays"
)


class Conversation:
    """One at a terminal, with one model.

    Args:
        llm: the model.
        session: where it begins.
        raw: no chat template: the model goes on with one text, to which each message is added as it is.
        plain: replies as text, not as rendered Markdown.
    """

    def __init__(self, llm: LLM, session: Session, raw: bool, plain: bool):
        self.llm, self.session, self.raw, self.plain = llm, session, raw, plain
        self.replies: list[Reply] = []
        self.known: list[int] = []  # tokens that the next prompt should begin with
        self.done = False
        if shows_markdown(plain):
            import terminal.markdown  # noqa: F401 (now, rather than between the first token and its being seen)

    def run(self) -> int:
        """Read and answer until it is left. Returns the exit code."""
        words = {"/set": SETTINGS, "/save": None, "/load": None}
        prompt = Prompt(state_directory() / "history", {name: words.get(name, ()) for name in COMMANDS})
        if prompt.why_no_history:
            say(prompt.why_no_history)
        say("/help lists the commands. Ctrl-C stops a reply, Ctrl-D leaves.")
        interrupted = False
        while not self.done:
            try:
                stderr.print()
                text = prompt.read()
                interrupted = False
                self.take(text)
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    return 130
                interrupted = True
                say("Ctrl-D leaves, and so does another Ctrl-C.")
            except BrokenPipeError:
                raise
            except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:  # the conversation goes on
                say(str(error), "red")
        return 0

    def take(self, text: str) -> None:
        """Answer a message, or do what a command says.

        Raises: what says why it can not be done; the session is as it was then.
        """
        message, quoted = unquoted(text)
        if not message.strip():
            return
        command = "" if quoted else message.strip()
        if command.startswith("//"):
            message = command[1:]
        elif command.startswith("/"):
            self._do(*command.split(None, 1))
            return
        self._reply([*self.session.messages, {"role": "user", "content": message}])

    def _do(self, name: str, argument: str | None = None) -> None:
        if name not in COMMANDS:
            hint = nearest(name, COMMANDS) or ": see /help"
            raise ValueError(f"there is no command {name}{hint} (// begins a message with a slash)")
        form, _, run = COMMANDS[name]
        if argument is not None and not form:
            raise ValueError(f"{name} takes no argument, got {argument!r}")
        run(self, None if argument is None else unquoted(argument)[0])

    def _reply(self, messages: list[dict]) -> None:
        """Answer the last of `messages`, and make them, with the reply, the session's."""
        first = self._fit(messages)
        if first > self.session.first:
            say(f"The context is full: the oldest {first // 2} turn(s) are no longer sent.")
            self.known = []
        reply = generate(self.llm, self._prompt(messages, first), self.session.params, self.plain)
        if reply is None:
            say("Stopped before anything came: the conversation is as it was.")
            return
        self.session.messages = [*messages, {"role": "assistant", "content": reply.text}]
        self.session.first = first
        self.replies.append(reply)
        used, limit = len(reply.token_ids), self.llm.engine.max_model_len
        say(f"{reply.footer()}; context {used:,} of {limit:,} ({used / limit:.0%})")
        same = _common_prefix(self.known, reply.token_ids)
        if same < len(self.known) - 1:  # the last token's K and V have never been computed
            say(
                f"from token {same} on, the conversation so far is not tokenized as it was generated: "
                "the cache serves what is before"
            )
        self.known = reply.token_ids
        if used >= WARN_AT * limit:
            say(f"{used / limit:.0%} of the context is used: {RULE}.", "yellow")

    def _prompt(self, messages: list[dict], first: int) -> str | list[dict]:
        if self.raw:
            return "".join(message["content"] for message in messages[first:])
        return self.session.prompt(messages, first)

    def _count(self, messages: list[dict], first: int) -> int:
        prompt = self._prompt(messages, first)
        return (
            len(self.llm.get_tokenizer().encode(prompt)) if isinstance(prompt, str) else self.llm.count_tokens(prompt)
        )

    def _fit(self, messages: list[dict]) -> int:
        """The first message to send: as before, or later if there would be no room for a reply (RULE).

        Many turns go at once, for what follows them has to be computed anew.
        """
        limit, first = self.llm.engine.max_model_len, self.session.first
        reserved = min(self.session.params.max_tokens or limit, limit // 8)
        if self._count(messages, first) + reserved <= limit:
            return first
        turns = range(first, len(messages), 2)
        fits = bisect.bisect_left(turns, True, key=lambda turn: self._count(messages, turn) <= limit * 3 // 4)
        return turns[min(fits, len(turns) - 1)]

    # The commands. `argument` is None if there is none.

    def help(self, argument: str | None) -> None:
        table = Table.grid(padding=(0, 2))
        for name, (form, text, _) in COMMANDS.items():
            table.add_row(escape(f"{name} {form}".strip()), text)
        stderr.print(table)
        say('"""\nseveral lines\n"""  is one message; so is a paste. // begins a message with a slash.')
        say(f"Context: {RULE}.")

    def system(self, argument: str | None) -> None:
        if argument is None:
            say(f"system: {self.session.system}" if self.session.system else "no system message")
            return
        if self.raw:
            raise ValueError("--raw has no chat template, and so no system message")
        self.session.system = "" if argument == '""' else argument
        self.session.system = self.session.system or None
        self.known = []
        say("system message set" if self.session.system else "system message removed")

    def set(self, argument: str | None) -> None:
        name, _, value = (argument or "").partition(" ")
        if not value.strip():
            raise ValueError(f"/set NAME VALUE; names: {', '.join(SETTINGS)}")
        self.session.set(name, value)
        say(f"{name} = {getattr(self.session.params, name)!r}")

    def show(self, argument: str | None) -> None:
        engine = self.llm.engine
        table = Table.grid(padding=(0, 2))
        table.add_row(
            "model", escape(f"{engine.model_path.name}, {str(engine.dtype).removeprefix('torch.')} on {engine.device}")
        )
        table.add_row("context", f"{engine.max_model_len:,} tokens; {RULE}")
        table.add_row("system", escape(self.session.system or "-"))
        for name, value in self.session.settings().items():
            table.add_row(name, escape(repr(value)))
        stderr.print(table, highlight=False)

    def clear(self, argument: str | None) -> None:
        self._become([])
        say("The conversation is empty; system message and settings are as they were.")

    def undo(self, argument: str | None) -> None:
        if not self.session.messages:
            raise ValueError("nothing to undo")
        self._become(self.session.messages[:-2])
        say(f"The last turn is gone; {len(self.session.messages) // 2} left.")

    def regen(self, argument: str | None) -> None:
        if not self.session.messages:
            raise ValueError("no reply to generate again")
        if self.session.params.greedy:
            say("temperature is 0: the reply will be the same (/set temperature 0.7)")
        elif self.session.params.seed is not None:
            say("seed is set: the reply will be the same (/set seed none)")
        self.known = []
        self._reply(self.session.messages[:-1])

    def save(self, argument: str | None) -> None:
        file = _file("/save", argument)
        self.session.save(file)
        say(f"saved to {file}")

    def load(self, argument: str | None) -> None:
        file = _file("/load", argument)
        loaded = dataclasses.replace(self.session)
        model = loaded.load(file)
        if self.raw and loaded.system:
            raise ValueError(f"{file} has a system message, and --raw has no chat template to send it by")
        self.session, self.known = loaded, []
        other = f" They were with {model}, not {self.session.model}." if model != self.session.model else ""
        say(f"{len(self.session.messages) // 2} turn(s) from {file}.{other}")

    def stats(self, argument: str | None) -> None:
        replies, blocks = self.replies, self.llm.engine.scheduler.block_manager
        tokens_in, cached = sum(r.num_prompt_tokens for r in replies), sum(r.num_cached_tokens for r in replies)
        table = Table.grid(padding=(0, 2))
        table.add_row("replies", str(len(replies)))
        table.add_row("tokens in", f"{tokens_in:,}, of which {cached:,} came from the prefix cache")
        table.add_row("tokens out", f"{sum(r.num_output_tokens for r in replies):,}")
        firsts = [r.time_to_first_token for r in replies if r.time_to_first_token]
        rates = [r.decode_rate for r in replies if r.decode_rate]
        table.add_row("TTFT", f"{sum(firsts) / len(firsts):.2f} s on average" if firsts else "-")
        table.add_row("decode", f"{sum(rates) / len(rates):.1f} tok/s on average" if rates else "-")
        table.add_row(
            "KV blocks",
            f"{blocks.num_blocks - blocks.num_free_blocks:,} in use, {blocks.num_cached_blocks:,} cached, "
            f"{blocks.num_blocks:,} in all, of {blocks.block_size} tokens",
        )
        stderr.print(table, highlight=False)

    def exit(self, argument: str | None) -> None:
        self.done = True

    def _become(self, messages: list[dict]) -> None:
        self.session.messages = messages
        self.session.first = min(self.session.first, len(messages))
        self.known = []


COMMANDS: dict[str, tuple[str, str, Callable[[Conversation, str | None], None]]] = {
    "/help": ("", "this list", Conversation.help),
    "/system": ("[TEXT]", 'show or set the system message; "" removes it', Conversation.system),
    "/set": ("NAME VALUE", "change a sampling setting, e.g. /set temperature 0.7", Conversation.set),
    "/show": ("", "model, system message and settings", Conversation.show),
    "/clear": ("", "forget the conversation, keep system message and settings", Conversation.clear),
    "/undo": ("", "forget the last turn", Conversation.undo),
    "/regen": ("", "another reply to the last message", Conversation.regen),
    "/save": ("FILE", "write conversation, system message and settings", Conversation.save),
    "/load": ("FILE", "go on with what was saved", Conversation.load),
    "/stats": ("", "tokens, times and KV blocks", Conversation.stats),
    "/exit": ("", "leave, as Ctrl-D does", Conversation.exit),
}


def say(text: str, style: str = "dim") -> None:
    stderr.print(escape(text), style=style, highlight=False, soft_wrap=not stderr.is_terminal)


def _file(command: str, argument: str | None) -> Path:
    if argument is None:
        raise ValueError(f"{command} FILE")
    return Path(argument).expanduser()


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
