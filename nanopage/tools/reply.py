"""Takes a reply apart while it streams: the reasoning, the content, and the calls of tools.

    <think>They ask for…</think>I'll look it up.<tool_call>{"name": "find", "arguments": {"city": "Oslo"}}</tool_call>
    ╰───── Reasoning ──────────╯╰── Content ───╯                  ╰ Call ╯               ╰── Arguments ──╯

A state machine reads one character after the other. It is written as a generator: where it waits for a character, it
yields. Characters that may become part of a call are held back until that is certain. If no call comes of them, they
are content. A call is certain with its name, which must be that of a tool, and from then on its arguments stream as
the model writes them. So the pieces of a stream add up to what the whole text gives at once.
"""

from collections import deque
from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass, field

from nanopage.tools.formats import ToolFormat

THINK, END_THINK = "<think>", "</think>"
MAX_HELD = 1024  # characters that are held back: bounds the work of reading them again if they become content
KEYS = ("arguments", "parameters")  # models of all formats sometimes write the other one


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of a call."""

    index: int
    text: str


Piece = Reasoning | Content | Call | Arguments


@dataclass
class ToolCall:
    """A call as the model has written it. `arguments` is JSON, unless the reply was cut or the model made a mistake."""

    name: str
    arguments: str


@dataclass
class Reply:
    """A reply as a whole. What it does not have is empty."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Reasoning):
            self.reasoning += piece.text
        elif isinstance(piece, Content):
            self.content += piece.text
        elif isinstance(piece, Call):
            self.calls.append(ToolCall(piece.name, ""))
        else:
            self.calls[piece.index].arguments += piece.text


class _ReadAgainError(Exception):
    """What is held back is something else.

    Args: is_content: whether its first character is content. What follows may still begin a call.
    """

    def __init__(self, is_content: bool = True):
        super().__init__()
        self.is_content = is_content


State = Generator[None, str, None]
Reading = Generator[None, str, str]  # returns the first character after what it has read


class ReplyReader:
    """Reads one reply.

    Args:
        tool_format: how the model writes calls; None if it has no tools.
        names: of the tools. Other names are not calls.
        parallel: whether calls after the first one count. Otherwise they are left out.
        reasons: whether the reply may begin with `<think>`.
        reasoning: whether the prompt ends with `<think>`, so that the reply begins within the reasoning.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        names: Collection[str],
        parallel: bool = True,
        reasons: bool = False,
        reasoning: bool = False,
    ):
        self.format, self.names, self.parallel = tool_format, names, parallel
        self.whole = Reply()  # all that has been read
        self._pieces: list[Piece] = []  # that nobody has taken
        self._held = ""  # characters that have been read, and are part of no piece yet
        self._num_calls = 0
        self._at_start = True  # nothing but white space and reasoning has been read
        self._closing = False  # what is held back comes after a call
        first = self._reasoning() if reasoning else self._thinking_or_text() if reasons else self._text()
        self._state: State = self._begin(first)

    def feed(self, text: str) -> list[Piece]:
        """Read on. Returns what has become certain."""
        self._read(text)
        return self._take()

    def end(self) -> list[Piece]:
        """The reply has ended. Returns the rest."""
        self._read([""])
        return self._take()

    def _take(self) -> list[Piece]:
        """The pieces that nobody has taken. Neighbours of the same kind are joined."""
        joined: list[Piece] = []
        for piece in self._pieces:
            last = joined[-1] if joined else None
            if isinstance(piece, Call) or type(last) is not type(piece):
                joined.append(piece)
            elif isinstance(piece, Arguments):
                joined[-1] = Arguments(piece.index, last.text + piece.text)
            else:
                joined[-1] = type(piece)(last.text + piece.text)
        self._pieces = []
        for piece in joined:
            self.whole.add(piece)
        return joined

    def _read(self, characters: Iterable[str]) -> None:
        """Args: characters: the end of the reply is an empty one."""
        todo = deque(characters)
        while todo:
            character = todo.popleft()
            self._held += character
            try:
                self._state.send(character)
            except StopIteration:
                return  # the reply has ended
            except _ReadAgainError as error:
                held, self._held = self._held, ""
                if not character and self._closing:
                    return  # the model has not closed its last call
                first = len(held) - len(held.lstrip()) + 1 if error.is_content else 0
                self._content(held[:first])
                todo.extendleft(reversed([*held[first:], *([] if character else [""])]))
                self._state = self._begin(self._text())

    def _begin(self, state: State) -> State:
        next(state)
        return state

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))
        self._at_start = self._at_start and not text.strip()
        self._closing = self._closing and not text
        self._held = ""

    def _reason(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    # The states. Each begins when the character before it has been read.

    def _thinking_or_text(self) -> State:
        """The beginning of a reply that may think first."""
        character = yield from self._after_spaces()
        for expected in THINK:
            if character != expected:
                raise _ReadAgainError(is_content=False)
            character = yield
        self._held = character
        yield from self._reasoning(character)

    def _reasoning(self, character: str | None = None) -> State:
        """Up to `</think>`. `character` is the first one, if it has been read."""
        if character is None:
            character = yield
        while character and not self._held.endswith(END_THINK):
            # All but what may be the beginning of `</think>` is certain.
            keep = next(n for n in range(len(END_THINK), -1, -1) if self._held.endswith(END_THINK[:n]))
            self._reason(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            character = yield
        self._reason(self._held.removesuffix(END_THINK))
        self._held = ""
        if character:
            character = yield from self._after_spaces()  # which belong to nothing
            self._held = character
            yield from self._text(character)

    def _text(self, character: str | None = None) -> State:
        """Content, until a call begins. `character` is the first one, if it has been read."""
        while True:
            if character is None:
                character = yield
            if not character:
                self._content("" if self._closing else self._held)
                return
            begins = ""
            if self.format is not None and character == self.format.begin[0]:
                begins = yield from self._after_mark(self.format.begin, character)
                begins = begins if not begins.isspace() else (yield from self._after_spaces())
            elif self.format is not None and self.format.bare and self._at_start and character == "{":
                begins = character
            if begins:
                character = yield from self._calls(begins)
                continue
            if self.format is None or not character.isspace():  # white space may be before a call
                self._content(self._held)
            character = None

    def _calls(self, character: str) -> Reading:
        """One or more calls, up to the mark that ends them."""
        assert self.format is not None
        if self.format.named and character not in "[{":
            return (yield from self._named_call(character))
        in_list = self.format.named and character == "["
        separator, end = (",", "]") if in_list else (self.format.separator, self.format.end)
        if in_list:
            character = yield from self._after_spaces()
        while True:
            yield from self._object(character)
            self._closing, self._held = True, ""
            character = yield from self._after_spaces()
            if not separator or character != separator:
                break
            character = yield from self._after_spaces()
        if end:
            character = yield from self._after_mark(end, character)
            self._held = character
        return character

    def _after_mark(self, mark: str, character: str) -> Reading:
        """A mark that may begin with this character. Raises: _ReadAgainError if it is not that."""
        for expected in mark:
            if character != expected:
                raise _ReadAgainError
            character = yield
        return character

    def _named_call(self, character: str) -> Reading:
        """Mistral's newer form: name[ARGS]{...}, or name{...}."""
        head = ""
        while character != "{":
            head += self._checked(character)
            character = yield
        name, bracket, mark = head.partition("[")
        if bracket and not mark.endswith("ARGS]"):  # there may be an id before this mark
            raise _ReadAgainError
        self._call(name.strip())
        yield from self._arguments()
        return (yield)

    def _object(self, character: str) -> State:
        """{"name": ..., "arguments": {...}}. Other keys are left out."""
        if character != "{":
            raise _ReadAgainError
        name, is_call = "", False
        character = yield from self._after_spaces()
        while character != "}":
            key = yield from self._string(character)
            if (yield from self._after_spaces()) != ":":
                raise _ReadAgainError
            character = yield from self._after_spaces()
            if key == "name" and not name:
                name = yield from self._string(character)
                if name not in self.names:
                    raise _ReadAgainError
                character = yield from self._after_spaces()
            elif key in KEYS and character == "n":
                character = yield from self._after_mark("null", character)
            elif key in KEYS and not is_call:
                if not name or character != "{":
                    raise _ReadAgainError
                self._call(name)
                is_call = True
                yield from self._arguments()
                character = yield from self._after_spaces()
            else:
                character = yield from self._value(character)
            if character.isspace():
                character = yield from self._after_spaces()
            if character == ",":
                character = yield from self._after_spaces()
            elif character != "}":
                raise _ReadAgainError
        if not is_call:
            self._call(name)
            self._add_arguments("{}")

    def _arguments(self) -> State:
        """An object of which `{` has been read."""
        self._add_arguments("{")
        depth, in_string = 1, False
        while depth:
            character = yield
            if not character:
                return
            self._add_arguments(character)
            if in_string:
                if character == "\\":
                    self._add_arguments((yield))
                in_string = character != '"'
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
        self._held = ""

    def _string(self, character: str) -> Reading:
        """A string of JSON whose first character has been read. Returns what is between the quotes, without escapes:
        names of tools and keys have none."""
        if character != '"':
            raise _ReadAgainError
        text = ""
        while (character := self._checked((yield))) != '"':
            text += character
            if character == "\\":
                text += self._checked((yield))
        return text

    def _value(self, character: str) -> Reading:
        """A value that is left out. Returns the first character after it that is not white space."""
        depth = 0
        while depth or character not in ",}]":
            self._checked(character)
            if character == '"':
                yield from self._string(character)
            depth += (character in "{[") - (character in "}]")
            character = yield
        return character

    def _after_spaces(self) -> Reading:
        while (character := (yield)).isspace():
            pass
        return character

    def _checked(self, character: str) -> str:
        """The character, if there is one and not too many are held back. Raises: _ReadAgainError."""
        if not character or len(self._held) > MAX_HELD:
            raise _ReadAgainError
        return character

    def _call(self, name: str) -> None:
        """A call is certain. Raises: _ReadAgainError if it is not."""
        if name not in self.names:
            raise _ReadAgainError
        self._num_calls += 1
        self._held, self._at_start, self._closing = "", False, True
        if self._counts():
            self._pieces.append(Call(self._num_calls - 1, name))

    def _add_arguments(self, text: str) -> None:
        self._held = ""
        if text and self._counts():
            self._pieces.append(Arguments(self._num_calls - 1, text))

    def _counts(self) -> bool:
        return self.parallel or self._num_calls == 1
