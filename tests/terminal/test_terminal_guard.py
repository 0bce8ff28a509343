"""nanopage/terminal/guard.py: loops are found, and what people write on purpose is not taken for one."""

import random
from pathlib import Path
from string import ascii_uppercase

import pytest

from nanopage.terminal.guard import LoopGuard

FIRST = ("ba", "ce", "di", "fo", "gu", "ha")
SECOND = ("lan", "mer", "nis", "por", "qui", "rat", "sed", "tol", "vum", "wax")
WORDS = [first + second for first in FIRST for second in SECOND]  # 60
PARAGRAPH = (
    "In the heart of the old town there is a small market where people come to buy fresh bread, cheese and flowers. "
    "The streets around it are narrow and paved with stones, and in the evening the lamps make the houses look as if "
    "they were made of gold. Many visitors say that they will never forget the smell of coffee and the sound of the "
    "bells, which ring every hour until midnight.\n\n"
)


def loops(text: str, seed: int = 0) -> bool:
    """Whether a reply that comes in pieces of any size is taken for a loop."""
    rng, guard, at = random.Random(seed), LoopGuard(), 0
    while at < len(text):
        size = rng.randint(1, 7)
        if guard.feed(text[at : at + size]):
            return True
        at += size
    return False


def lines(form: str, count: int = 60) -> str:
    return "".join(form.format(i=i + 1, word=WORDS[i % 60], other=WORDS[i * 7 % 60]) for i in range(count))


def circles(seed: int, count: int = 500) -> str:
    """Sentences of any form, of few words."""
    rng = random.Random(seed)
    words = ["they", "are", "a", "being", "their", "own", "and", "never", "created", "it", "by", "the", "law", "is"]
    return " ".join(rng.choice(words) + rng.choice(["", "", "", ",", "."]) for _ in range(count))


@pytest.mark.parametrize(
    "text",
    [
        lines("{i}. The City of the Leopard welcomes you.\n"),
        lines("{i}. Buy some milk.\n"),
        lines("Step {i}: Go on with the next step\n"),
        lines("I went to the market to buy a {word} for my mother.\n"),
        lines("She said that the {word} was the most beautiful thing. "),
        lines("I like the {word}.\n"),
        lines("- The {word} is good.\n"),
        lines("{word}: This is a great way to learn about the world.\n"),
        lines("* **{word} {other}**: This is a great way to learn about the world.\n"),
        "".join(f"{i}. **{word}**: a sweet fruit from {WORDS[-i]}\n" for i, word in enumerate(WORDS[:10], 1)) * 12,
        "".join(f"{i + 1}. {WORDS[i % 10]}\n" for i in range(200)),
        PARAGRAPH * 12,
        (PARAGRAPH + "But nobody knew why the bells were so loud, and nobody asked for the reason.\n") * 12,
        lines("print({i})\n"),
        lines("print({i}) ", 80),
        lines("x{i} = {i} + 1\n"),
        lines("{i}. **Step {i}**: Go on with the next step.\n"),
        lines('    "key{i}": "value{i}",\n'),
        lines('{{"id": {i}, "name": "user{i}", "active": true}},\n'),
        "Welcome to the City of the Leopard! " * 60,
        "ha " * 400,
        "0, " * 400,
        "a" * 1200,
        "=" * 1200,
        "日本語の文章です。" * 130,
        "".join(f"I hope you passed {letter}, " for letter in ascii_uppercase * 3),
        "".join(f"It's {word}. You're {word}.\n" for word in WORDS[:20] * 3),
        lines("and they are the {word} of their own {word} and the {word} of nobody else but that of the {word} "),
        circles(0),
        circles(1),
    ],
    ids=lambda text: text[:24],
)
def test_loops_are_found(text):
    intro = "Of course! Here is what you asked for, as well as I can tell:\n\n"
    assert all(loops(intro + text, seed) for seed in range(3))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "| 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |\n" * 12,
        "ha " * 150,
        "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\n"
        "Life is but a dream.\n\n" * 6,
        "    values.append(0)\n" * 30,
        "<td></td>\n" * 40,
        lines('    "{word}",\n'),
        lines("    {word} = auto()\n"),
        lines("values.append('{word}')\n"),
        lines("<li>{word}</li>\n"),
        lines("INSERT INTO names (name, friend) VALUES ('{word}', '{other}');\n"),
        lines('<option value="{i}">{i}</option>\n', 31),
        "".join(f"{'<tr>' * (i % 7 == 1)}<td>{i}</td>{'</tr>' * (i % 7 == 0)}\n" for i in range(1, 32)),
        "=" * 300,
        " ".join(f"{i}," for i in range(1, 101)),
        "".join(f"{a} x {b} = {a * b}\n" for a in range(1, 6) for b in range(1, 11)),
        "".join(f"| {word} | {i * 37 % 97} | {i * i % 89} |\n" for i, word in enumerate(WORDS)),
        "".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\nTake one down and pass it around, {i - 1} "
                "bottles of beer on the wall.\n\n" for i in range(99, 92, -1)),
        "".join(f"- {word}: {other}\n" for word, other in zip(WORDS, WORDS[::-1], strict=True)),
        "".join(f"if (a[{i}] > b[{i}]) {{ swap(a[{i}], b[{i}]); }}\n" for i in (3, 1, 4, 1, 5, 9, 2, 6) * 4),
    ],
    ids=lambda text: text[:24] or "nothing",
)  # fmt: skip
def test_repetition_that_is_meant_is_not_cut(text):
    assert not any(loops(text, seed) for seed in range(3))


def test_no_code_and_no_document_of_this_repository_is_a_loop():
    root = Path(__file__).parents[2]
    files = [*root.glob("nanopage/*.py"), *root.glob("nanopage/engine/*.py"), *root.glob("docs/*.md")]
    cut = [file.name for file in files if LoopGuard().feed(file.read_text())]
    assert len(files) > 30 and cut == []


def test_a_reply_that_has_found_its_way_out_is_no_loop():
    guard = LoopGuard()
    assert guard.feed(lines("{i}. Buy some milk.\n"))
    guard.feed("Then he went home, where dinner was ready, and told everybody what had happened on the way.\n")
    assert not guard.feed("Nobody had ever heard of such a thing, and nobody believed it.\n")
