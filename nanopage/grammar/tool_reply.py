"""Takes a reply apart while it streams: the reasoning, the content, and the calls of tools.

    <think>They ask for…</think>I'll look it up.<tool_call>{"name": "find", "arguments": {"city": "Oslo"}}</tool_call>
    ╰───── Reasoning ──────────╯╰── Content ───╯                  ╰ Call ╯               ╰── Arguments ──╯

A state machine reads one character after the other. It is written as a generator, which yields where it waits for a
character. Characters that may become part of a call are held back until that is certain. If no call follows, they are
content. A call is certain once its name is complete, which must be the name of a tool. From then on its arguments
stream as the model writes them. Arguments before the name, or JSON within a string, are held back until they are whole.
So the pieces of a stream add up to what the whole text gives at once.
"""

import json
from collections import deque
from collections.abc import Collection, Generator, Iterable

from nanopage.grammar.tool_formats import ToolFormat
from nanopage.grammar.tool_pieces import Arguments, Call, Content, Piece, Reasoning, Reply
from nanopage.text.reasoning import ReasoningReader

MAX_HELD = 1024  # characters that are held back, except for arguments
MAX_ARGUMENTS = 2**18  # characters of arguments that are held back
MAX_READ_AGAIN = 2**18  # characters of a reply that are read again because they were no call: bounds the work
FENCE = "```"
KEYS = ("arguments", "parameters")  # models of each format sometimes write the other format's key


class _ReadAgainError(Exception):
    """The characters held back are not what the reader expected.

    Args: is_content: whether the first one is certainly content. The characters after it may still begin a call.
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
        names: the names of the tools. Other names are not calls.
        parallel: whether calls after the first one count. False: they are left out.
        reasoning: whether the prompt ends within the reasoning, so that the reply begins with it. Otherwise the reply
            may begin its reasoning itself. None: the model does not think.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        names: Collection[str],
        parallel: bool = True,
        reasoning: bool | None = None,
    ):
        self.format, self.names, self.parallel = tool_format, names, parallel
        self.whole = Reply()  # all that has been read
        self._pieces: list[Piece] = []  # pieces that nobody has taken
        self._held: list[str] = []  # characters that have been read, and are part of no piece yet
        self._num_read_again = 0
        self._num_calls = 0
        self._at_start = True  # nothing but white space and reasoning has been read
        self._closing = False  # what is held back comes after a call
        # The strings that calls may begin with.
        self._openers = "" if tool_format is None else tool_format.begin[0] + FENCE[0] + "{[" * tool_format.bare
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning)
        self._state: State = self._begin(self._text())

    def feed(self, text: str) -> list[Piece]:
        """Read on. Returns what has become certain."""
        if self._reasoning is not None:
            text = self._reason(*self._reasoning.feed(text))
        self._read(text)
        return self._take()

    def end(self) -> list[Piece]:
        """The reply has ended. Returns the rest."""
        rest = "" if self._reasoning is None else self._reason(*self._reasoning.end())
        self._read([*rest, ""])
        return self._take()

    def _take(self) -> list[Piece]:
        """The pieces that nobody has taken. Adjacent pieces of the same kind are joined."""
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
        """Args: characters: an empty character stands for the end of the reply."""
        todo = deque(characters)
        while todo:
            character = todo.popleft()
            self._held.append(character)
            try:
                self._state.send(character)
            except StopIteration:
                return  # the reply has ended
            except _ReadAgainError as error:
                held, self._held = "".join(self._held), []
                if not character and self._closing:
                    return  # the model has not closed its last call
                first = len(held) - len(held.lstrip()) + 1 if error.is_content else 0
                self._num_read_again += len(held)
                if self._num_read_again > MAX_READ_AGAIN:
                    first = len(held)
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
        self._held = []

    def _reason(self, reasoning: str, answer: str) -> str:
        if reasoning:
            self._pieces.append(Reasoning(reasoning))
        return answer

    # The states. Each begins when the character before it has been read.

    def _text(self) -> State:
        """Content, until a call begins."""
        character = None
        while True:
            character = (yield) if character is None else character
            if not character:
                self._content("" if self._closing else "".join(self._held))
                return
            if character in self._openers:
                character = yield from self._calls(character)
                continue
            if self.format is None or not character.isspace():  # white space may be before a call
                self._content("".join(self._held))
            character = None

    def _calls(self, character: str) -> Reading:
        """Calls, with the mark and the code fence that may be around them."""
        assert self.format is not None
        fenced = character == FENCE[0]
        character = yield from self._fence(character)
        marked = not self.format.bare or character == self.format.begin[0]
        if marked:
            character = yield from self._mark(self.format.begin, character)
            character = yield from self._spaces(character)
            fenced = fenced or character == FENCE[0]
            character = yield from self._fence(character)
        if self.format.named and character not in "[{":
            return (yield from self._named_call(character))
        in_list = character == "["
        if in_list:
            character = yield from self._spaces((yield))
        while True:
            yield from self._object(character, marked)
            self._closing, self._held = True, []
            character = yield from self._spaces((yield))
            if character in (",", ";"):
                character = yield from self._spaces((yield))
            elif character != "{":
                break
        for mark in ("]" if in_list else "", FENCE if fenced else "", self.format.end, FENCE if fenced else ""):
            if mark and (mark != FENCE or character == FENCE[0]):
                character = yield from self._mark(mark, character, is_content=False)
                self._held = [character]
                character = yield from self._spaces(character)
        return character

    def _fence(self, character: str) -> Reading:
        """The beginning of fenced code, ```json, if this character begins it. Returns the first character inside."""
        if character == FENCE[0]:
            character = yield from self._mark(FENCE, character)
            while character.isalpha():
                character = self._checked((yield))
            character = yield from self._spaces(character)
        return character

    def _mark(self, mark: str, character: str, is_content: bool = True) -> Reading:
        """A mark that may begin with this character. Raises: _ReadAgainError if the text is something else."""
        for expected in mark:
            if character != expected:
                raise _ReadAgainError(is_content)
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

    def _object(self, character: str, marked: bool) -> State:
        """{"name": ..., "arguments": {...}}, in any order. Other keys are left out.

        Args: marked: whether the object follows a mark. Otherwise it may well not be a call.
        """
        if character != "{":
            raise _ReadAgainError
        name, arguments, at_start, most = "", None, self._at_start, MAX_HELD
        character = yield from self._spaces((yield))
        while character != "}":
            key = yield from self._string(character, most)
            if (yield from self._spaces((yield))) != ":":
                raise _ReadAgainError
            character = yield from self._spaces((yield))
            if key == "name" and not name:
                name = yield from self._string(character, most)
                if name not in self.names:
                    raise _ReadAgainError
                character = yield
                if arguments is not None:
                    self._call(name, arguments)
            elif key in KEYS and arguments is None and name and character == "{":
                self._call(name)
                yield from self._arguments()
                character, arguments = (yield), ""
            elif key in KEYS and arguments is None:
                begin = len(self._held) - 1
                character = yield from self._value(character, MAX_ARGUMENTS)
                arguments, most = _read_arguments("".join(self._held[begin:-1])), len(self._held) + MAX_HELD
                if name:
                    self._call(name, arguments)
            elif marked or name or key in ("type", "id"):
                character = yield from self._value(character, most)
            else:
                raise _ReadAgainError
            character = yield from self._spaces(character)
            if character == ",":
                character = yield from self._spaces((yield))
            elif character != "}":
                raise _ReadAgainError
        if arguments is None:
            if not (marked or at_start):
                raise _ReadAgainError
            self._call(name, "{}")

    def _arguments(self) -> State:
        """The rest of an object after `{`."""
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
        self._held = []

    def _string(self, character: str, most: int) -> Reading:
        """A string of JSON whose first character has been read. Returns the text between the quotes. Escapes are not
        decoded, because names of tools and keys have none."""
        if character != '"':
            raise _ReadAgainError
        text = ""
        while (character := self._checked((yield), most)) != '"':
            text += character
            if character == "\\":
                text += self._checked((yield), most)
        return text

    def _value(self, character: str, most: int) -> Reading:
        """A value of JSON. Returns the first character after it and white space."""
        depth = 0
        while depth or character not in ",}]":
            self._checked(character, most)
            if character == '"':
                yield from self._string(character, most)
            depth += (character in "{[") - (character in "}]")
            character = yield
        return character

    def _spaces(self, character: str) -> Reading:
        """Returns the first character, from this one on, that is not white space."""
        while character.isspace():
            character = yield
        return character

    def _checked(self, character: str, most: int = MAX_HELD) -> str:
        """The character. Raises: _ReadAgainError at the end of the reply, or if too many characters are held back."""
        if not character or len(self._held) > most:
            raise _ReadAgainError
        return character

    def _call(self, name: str, arguments: str = "") -> None:
        """Add a call, if it is certain. Raises: _ReadAgainError otherwise."""
        if name not in self.names:
            raise _ReadAgainError
        self._num_calls += 1
        self._held, self._at_start, self._closing = [], False, True
        if self._counts():
            self._pieces.append(Call(self._num_calls - 1, name))
        self._add_arguments(arguments)

    def _add_arguments(self, text: str) -> None:
        self._held = []
        if text and self._counts():
            self._pieces.append(Arguments(self._num_calls - 1, text))

    def _counts(self) -> bool:
        return self.parallel or self._num_calls == 1


def _read_arguments(text: str) -> str:
    """The arguments of a call: an object, or a string that contains one. Null and an empty string mean no arguments.

    Raises: _ReadAgainError for anything else.
    """
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            text, value = value, json.loads(value, strict=False) if value.strip() else None
    except (ValueError, RecursionError):
        raise _ReadAgainError from None
    if not isinstance(value, dict | None):
        raise _ReadAgainError
    return "{}" if value is None else text.strip()
