"""The parts of a reply: as they come, and as a whole."""

from dataclasses import dataclass, field


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
    """A reply as a whole. Parts that it does not have are empty."""

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
