"""Exercise of chapter 12, solved."""

from dataclasses import dataclass


@dataclass
class Automaton:
    """A deterministic automaton whose first state is 0. As in the exercise."""

    moves: dict[tuple[int, str], int]
    final: set[int]


def walk(automaton: Automaton, state: int, text: str) -> int | None:
    """The state after a text that begins in `state`; None if the text is not allowed."""
    after: int | None = state
    for character in text:
        after = None if after is None else automaton.moves.get((after, character))
    return after


def index(automaton: Automaton, tokens: list[str]) -> dict[int, dict[int, int]]:
    """What may follow: state -> {token id: the state after it}. Rules as in the exercise."""
    reached: dict[int, dict[int, int]] = {}
    left = [0]
    while left:
        state = left.pop()
        if state not in reached:
            ends = {i: walk(automaton, state, text) for i, text in enumerate(tokens) if text}
            reached[state] = {i: end for i, end in ends.items() if end is not None}
            left += reached[state].values()
    alive = automaton.final & reached.keys()
    while more := {state for state, moves in reached.items() if alive & {*moves.values()}} - alive:
        alive |= more
    return {state: {i: end for i, end in reached[state].items() if end in alive} for state in alive}


def mask(allowed: dict[int, int], ends: bool, end_token: int, vocab_size: int) -> bytes:
    """The mask that nanopage sends to its workers. Arguments as in the exercise."""
    bits = sum(1 << i for i in {*allowed} | ({end_token} if ends else set()))
    return bits.to_bytes(-(-vocab_size // 8), "little")
