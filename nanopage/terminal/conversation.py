"""The conversation: messages, replies, and commands."""

import bisect
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanopage.terminal.images import Images, check_sight, images_of
from nanopage.terminal.prompt import Prompt, unquoted
from nanopage.terminal.reply import Model, Reply, Request, generate, show_again, shows_markdown
from nanopage.terminal.session import SETTINGS, Kept, Session, state_directory
from nanopage.terminal.signals import interruptible, unechoed
from nanopage.terminal.text import describe_error, say
from nanopage.vllm.engine_args import nearest

if TYPE_CHECKING:
    from nanopage.terminal.loading import Load
    from nanopage.terminal.tools import Toolbox

WARN_AT = 0.8  # share of the context
MAX_SHOWN = 500  # characters of an earlier message, which may be a whole file
MAX_CALLS = 8  # replies with calls of tools to one message; the next reply is the last
Command = tuple[str, str, Callable[["Conversation", str | None], None]]  # form of its argument, description, function
RULE = (
    "when the context is full the oldest turns are left out, whole, until a quarter of it is free; "
    "the system message stays"
)


class _Left(Exception):
    """The user has left by Ctrl-C, twice in a row."""


@dataclasses.dataclass(eq=False)
class Conversation:
    """A conversation at a terminal."""

    loaded: Model | None  # what answers; None while there is none
    session: Session  # the turns and settings to begin with
    commands: Mapping[str, Command]  # the lines that begin with a slash, by name
    raw: bool  # no chat template: each message is added as it is to one text, which the model goes on with
    plain: bool  # show replies as text, not as rendered Markdown
    verbose: bool = False  # say more, and show the tracebacks of errors
    kept: Kept | None = None  # writes the conversation to disk; None: neither it nor a history is written
    argument: str | None = None  # the argument with which `load` made the model
    load: "Load | None" = None  # gets another model, for /model
    toolbox: "Toolbox | None" = None  # functions that the model may call

    def __post_init__(self) -> None:
        self.arguments: dict[str | None, str | None] = {self.session.model: self.argument}  # of `load`, by shown names
        self.defaults = self.session.params
        self.given: set[str] = set()  # settings that the user has set, even if to the default
        self.replies: list[Reply] = []
        self.known: list[int] = []  # tokens with which the next prompt should begin
        self.last: Reply | None = None  # the session's last reply, if this process generated its end
        self.last_ids: list[int] = []  # all tokens of that reply, if they are known
        self.counted = False  # whether the tokens of the last prompt could be counted before it was sent
        self.earlier: list[tuple[list[dict], int, str]] = []  # for /undo: messages, `first`, and the words to say
        self.images, self.attached = Images(), list[dict]()  # attached: what goes with the next message
        self.done = False
        self._typed = bytearray()  # during replies, for the next prompt
        if shows_markdown(self.plain):
            import nanopage.terminal.markdown  # noqa: F401 (imported now, so that the first token does not wait)

    @property
    def model(self) -> Model:
        if self.loaded is None:
            raise RuntimeError("no model is loaded: /model PATH loads one")
        return self.loaded

    def run(self) -> int:
        """Read and answer until the user leaves. Returns the exit code."""
        words = {"/set": SETTINGS} | dict.fromkeys(("/save", "/load", "/model", "/image"))
        history = state_directory() / "history" if self.kept is not None else None
        prompt = Prompt(history, {name: words.get(name, ()) for name in self.commands})
        if prompt.why_no_history:
            say(prompt.why_no_history)
        try:
            while not self.done:
                try:
                    say("")
                    self._take_safely(self._read(prompt))
                except EOFError:
                    return 0
                except KeyboardInterrupt:  # just before the prompt, or just after a reply
                    pass
                except _Left:
                    return 130
        finally:
            self._keep()
        return 0

    def _read(self, prompt: Prompt) -> str:
        """What is typed. Raises: EOFError on Ctrl-D; _Left on Ctrl-C in an empty line, twice in a row."""
        interrupted = False
        while True:
            if self._typed:
                prompt.type_ahead(bytes(self._typed))
                self._typed.clear()
            try:
                return prompt.read()
            except KeyboardInterrupt:
                if interrupted and not prompt.typed:
                    raise _Left from None
                interrupted = True
                say(f"Ctrl-D leaves{'.' if prompt.dumb else ', and so does another Ctrl-C.'}")

    def _take_safely(self, text: str) -> None:
        """Answer or run `text`. Errors are shown, and the conversation goes on."""
        try:
            self.take(text)
        except KeyboardInterrupt:
            say("Stopped.")
        except (SystemExit, BrokenPipeError):  # stdout has no reader any more
            raise
        except BaseException as error:  # when Rust panics, tokenizers raises something that is not an Exception
            say(describe_error(error, self.verbose), "red")
        self._keep()

    def _keep(self) -> None:
        if self.kept is None:
            return
        try:
            self.kept.keep(self.session)
        except OSError as error:
            say(f"the conversation is no longer kept: {error}", "yellow")
            self.kept = None

    def take(self, text: str) -> None:
        """Answer a message, or run a command. Raises: ValueError, TypeError, OSError and whatever the engine raises;
        the session has not changed then."""
        message, quoted = unquoted(text)
        if not message.strip():
            return
        command = "" if quoted else message.strip()
        if command.startswith("//"):
            message = command[1:]
        elif command.startswith("/"):
            self._do(*command.split(None, 1))
            return
        self.ask(message)

    def _do(self, name: str, argument: str | None = None) -> None:
        if name not in self.commands:
            hint = nearest(name, [known for known in self.commands if known[1:].isalpha()]) or ": see /help"
            raise ValueError(f"there is no command {name}{hint} (// begins a message with a slash)")
        form, _, run = self.commands[name]
        if argument is not None and not form:
            raise ValueError(f"{name} takes no argument, got {argument!r}")
        run(self, None if argument is None else unquoted(argument)[0])

    def ask(self, message: str) -> None:
        asked = {"role": "user", "content": message} | ({"images": self.attached} if self.attached else {})
        self.reply([*self.session.messages, asked], "The last turn is gone")
        if any(sent is asked for sent in self.session.messages):
            self.attached = []

    def reply(
        self,
        messages: list[dict],
        undone: str,
        begun: str = "",
        begun_ids: list[int] | None = None,
        steps: Sequence[dict] = (),
    ) -> None:
        """Answer the last of `messages`. They and the reply become the session's.

        Args:
            steps: calls of tools and their results, which come before the reply.
            undone: what /undo says when it takes the reply back.
            begun, begun_ids: the existing beginning of the reply, as text and as tokens.
        """
        begun_ids, steps = begun_ids or [], list(steps)
        for number in range(MAX_CALLS + 1):
            reads_calls = not begun and number < MAX_CALLS
            request = functools.partial(self._request, messages, steps, reads_calls, begun, begun_ids)
            first = self._fit(messages, request)
            if first > self.session.first:
                say(f"The context is full: the oldest {first // 2} turn(s) are no longer sent.")
                self.known = []
            with interruptible(self._typed) as interrupt:
                reply = generate(self.model, request(first), interrupt, self.plain)
                if reply is None:
                    break
                self.replies.append(reply)
                if not reply.calls:
                    message = {"role": "assistant", "content": begun + reply.text} | ({"steps": steps} if steps else {})
                    self.become([*messages, message], first, undone)
                    num_before = (reply.num_prompt_tokens or 0) - len(begun_ids)
                    self.last, self.last_ids = reply, reply.token_ids[num_before:]
            self._say_figures(reply)
            if not reply.calls:
                return
            assert self.toolbox is not None
            steps += self.toolbox.answer(reply.content, reply.calls)
        say("Stopped before anything came: the conversation is as it was.")

    def _say_figures(self, reply: Reply) -> None:
        if ending := reply.ending(self.session.params.max_tokens):
            say(f"{ending} (/continue goes on)")
        limit = self.model.max_model_len
        say(reply.footer(limit))
        pairs = zip(self.known, reply.token_ids, strict=False)
        same = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])  # tokens of the common prefix
        if self.verbose and same < len(self.known) - 1:  # the last token's K and V have never been computed
            say(
                f"from token {same} on, the conversation so far is not tokenized as it was generated: "
                "the cache serves what is before"
            )
        self.known = reply.token_ids
        if limit is not None and reply.num_tokens >= WARN_AT * limit:
            what_then = f": {RULE}" if self.counted else ", and the server does not count what would fit"
            say(f"{reply.num_tokens / limit:.0%} of the context is used{what_then}.", "yellow")

    def _request(
        self, messages: list[dict], steps: list[dict], reads_calls: bool, begun: str, begun_ids: list[int], first: int
    ) -> Request:
        """What to send for these messages from `first` on, and for what followed the last of them."""
        prompt: str | list[dict]
        if self.raw:
            prompt = "".join(message["content"] for message in messages[first:])
        else:
            prompt = self.images.put(self.session.prompt(messages, first)) + steps
        tools = None if self.toolbox is None else self.toolbox.describe()
        return Request(prompt, self.session.params, frozenset(self.given), tools, reads_calls, begun, begun_ids)

    def _fit(self, messages: list[dict], request: Callable[[int], Request]) -> int:
        """The index of the first message to send: the same as before, or a later one if a reply would not fit (RULE).
        If the tokens cannot be counted, it is the same.

        Many turns are left out at once, because what follows them is computed again.

        Args: request: what would be sent from a message on.
        """

        def count(first: int) -> int:
            return self.model.count(request(first)) or 0

        limit, first = self.model.max_model_len, self.session.first
        tokens = None if limit is None else self.model.count(request(first))
        self.counted = tokens is not None
        if limit is None or tokens is None:
            return first
        reserved = min(self.session.params.max_tokens or limit, limit // 8)
        if tokens + reserved <= limit:
            return first
        turns = range(first, len(messages), 2)
        fits = bisect.bisect_left(turns, True, key=lambda turn: count(turn) <= limit * 3 // 4)
        return turns[min(fits, len(turns) - 1)]

    def become(self, messages: list[dict], first: int, undone: str) -> None:
        """Change the conversation. /undo takes the change back and says `undone`."""
        self.earlier.append((self.session.messages, self.session.first, undone))
        self._set_messages(messages, first)

    def _set_messages(self, messages: list[dict], first: int) -> None:
        self.session.messages, self.session.first = messages, min(first, len(messages))
        self.last, self.last_ids = None, []

    def describe_model(self) -> str:
        return f"{self.session.model}, {self.model.where}"

    def check_images(self) -> None:
        """Raises: ValueError if no images can be sent here."""
        if self.raw:
            raise ValueError("--raw has no chat template to send images by")
        check_sight(self.model.sees_images, self.session.model)

    def undo(self) -> str:
        """Take back the last change of the conversation. Returns words for it. Raises ValueError if there is none."""
        if self.earlier:
            messages, first, undone = self.earlier.pop()
        elif self.session.messages:
            messages, first, undone = self.session.messages[:-2], self.session.first, "The last turn is gone"
        else:
            raise ValueError("nothing to undo")
        self._set_messages(messages, first)
        self.known = []
        return undone

    def load_file(self, file: Path, system: str | None = None, changes: dict | None = None) -> None:
        """Go on with the session in `file`, and show its last turn.

        Args:
            system: a system message instead of the session's.
            changes: changes of the session's settings.

        Raises: ValueError, TypeError, OSError; nothing has changed then.
        """
        loaded = dataclasses.replace(self.session)
        model = loaded.load(file)
        loaded.system = system or loaded.system
        loaded.params = dataclasses.replace(loaded.params, **changes or {})
        if self.raw and loaded.system:
            raise ValueError(f"{file} has a system message, and --raw has no chat template to send it by")
        if images_of(loaded.messages):
            self.check_images()
            self.images.load(loaded.messages)
        try:
            self.model.check(loaded.params)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} has settings that this model refuses: {error}") from None
        self.session, self.known, self.earlier = loaded, [], []
        self.last, self.last_ids = None, []
        name = str(file)
        if self.kept is not None:
            self.kept.begin(file, loaded)
            name = file.name if file.parent == self.kept.directory else name
        other = f" They were with {model}, not {self.session.model}." if model != self.session.model else ""
        say(f"{len(self.session.messages) // 2} turn(s) from {name}.{other}")
        if self.session.messages:
            question, answer = (message["content"] for message in self.session.messages[-2:])
            say(f"\n> {question[:MAX_SHOWN]}{' ...' if len(question) > MAX_SHOWN else ''}")
            show_again(answer, self.plain)

    def switch_model(self, model: str | None) -> None:
        """Go on with another model. `model` is an argument of `load`, or the name under which a model was shown before.
        Raises: ValueError, OSError, MemoryError; the present model then stays, or is loaded again."""
        if self.load is None:
            raise ValueError("the model cannot be changed here")
        model = self.arguments.get(model, model)
        self.load.check(model, bool(self.attached or images_of(self.session.messages)))
        settings = self.session.settings()
        changed = {name: value for name, value in settings.items() if value != getattr(self.defaults, name)}
        try:
            self._load_model(model, changed)
        except BaseException:
            self._load_model(self.argument, changed)
            raise
        self.argument = self.arguments[self.session.model] = model

    def _load_model(self, model: str | None, changed: dict) -> None:
        """Load another model. It uses its own settings, except for `changed`, which the user has set."""
        assert self.load is not None
        self.loaded = None  # free the old model first: two models may not fit into memory
        gc.collect()
        with unechoed():
            self.loaded, name, defaults = self.load(model)
        params = dataclasses.replace(defaults, **changed)
        self.model.check(params)
        self.session.model, self.session.params, self.defaults = name, params, defaults
        self.known, self.last_ids = [], []
