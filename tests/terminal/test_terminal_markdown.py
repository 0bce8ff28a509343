"""nanopage/terminal/markdown.py: the same blocks however a text arrives, each printed once, on an emulated screen."""

import random
import re

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from screens import Reflowing, Screen

from nanopage.terminal.markdown import BLOCKS, BlockSplitter, ReplyPrinter

PIECES = [
    *("# Head\n", "para one\n", "still one\n", "\n", "\n\n", "- item\n", "  - deeper\n", "1. first\n", "> quote\n"),
    *(
        "```python\n",
        "```\n",
        "~~~\n",
        "    indented\n",
        "| a | b |\n",
        "|---|---|\n",
        "| 1 | 名 |\n",
        "---\n",
        "===\n",
    ),
    *("<div>\n", "</div>\n\n", "[x]: http://y\n", "* * *\n", "#tag", "*", "-", "`", "\t", " ", "🙂", "日本語", "\\"),
]
TEXT = """# Fruits

Here are **three** fruits, 果物 🍎🍐🍌, with `code` and a [link](http://example.com/a).
A line of its own.

| name | 色 |
|------|----|
| apple | red |
| pear | green |

1. one
   - nested

   loose
2. two

```python
def f(x):

    return x  # kept
```

> quoted
still quoted

<b>tags are text</b>

The end, without a newline"""


def split(parts) -> list[str]:
    splitter = BlockSplitter()
    blocks = [block for part in parts for block in splitter.feed(part)]
    return blocks + splitter.finish()


def cut(text: str, seed: int) -> list[str]:
    at = sorted(random.Random(seed).sample(range(len(text) + 1), min(40, len(text))))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.integers(0, 1000))
def test_any_split_of_a_text_gives_the_same_blocks_and_loses_nothing(text, seed):
    whole = split([text])
    assert split(cut(text, seed)) == whole == split(text)
    assert [line for line in "".join(whole).split("\n") if line.strip()] == [
        line for line in text.split("\n") if line.strip()
    ]
    # The blocks are those that Markdown has.
    tokens = [token for token in BLOCKS.parse(text) if token.level == 0 and token.nesting >= 0]
    assert len(tokens) == len(whole)


def test_a_block_is_finished_by_a_blank_line_or_once_the_next_one_has_begun():
    splitter = BlockSplitter()
    assert splitter.feed("para\n#") == []  # "#" may become "#hashtag", which goes on with the paragraph
    assert splitter.feed("hashtag\n") == []
    assert splitter.feed("\n") == ["para\n#hashtag\n\n"]
    assert splitter.feed("- a\n\n- b\n\n  c\n") == []  # one list
    assert splitter.feed("```\n\n# no heading\n\n") == ["- a\n\n- b\n\n  c\n"]
    assert splitter.feed("```\nend") == []
    assert splitter.finish() == ["```\n\n# no heading\n\n```\n", "end"]


def printer(screen: Screen, monkeypatch, **options) -> ReplyPrinter:
    made = ReplyPrinter(screen, interval=0, **{"reflows": False} | options)
    monkeypatch.setattr(made, "_size", lambda: (screen.terminal.columns, screen.terminal.lines))
    monkeypatch.setattr("nanopage.terminal.markdown.time.monotonic", lambda: 0.0)  # so that every piece is a frame
    return made


def show(screen: Screen, parts, monkeypatch, **options) -> list[str]:
    made = printer(screen, monkeypatch, **options)
    for part in parts:
        made.feed(part)
    made.finish()
    return screen.lines()


@pytest.mark.parametrize("rows", [5, 24])
def test_what_is_left_on_the_screen_does_not_depend_on_how_the_text_came(monkeypatch, rows):
    whole = show(Screen(rows=rows), [TEXT], monkeypatch)
    for seed in range(5):
        assert show(Screen(rows=rows), cut(TEXT, seed), monkeypatch) == whole
    assert show(Screen(rows=rows), TEXT, monkeypatch) == whole
    text = "\n".join(whole)
    for shown in ("three", "果物 🍎🍐🍌", "(http://example.com/a)", "\nA line of its own.", "\n    return x  # kept\n",
                  "<b>tags are text</b>", "The end, without a newline", "• nested"):  # fmt: skip
        assert text.count(shown) == 1
    assert "**" not in text
    assert "```" not in text


@pytest.mark.parametrize("at", [3, 17, 29, 50, 63, 75, 96, 103, 105])
def test_what_other_programs_write_in_the_middle_does_not_repeat_the_block(monkeypatch, at):
    text = "One *two three* four five\nsix seven eight nine ten.\n\n"
    text += "1. eleven\n2. twelve thirteen\n\n```\nfour = teen\n```\nend"
    screen = Screen(columns=16, rows=60)
    made = printer(screen, monkeypatch)
    for character in text[:at]:
        made.feed(character)
    made.go_on_below()
    screen.write("^Z\n[1]+ Stopped\n$ fg\n")
    for character in text[at:]:
        made.feed(character)
    made.finish()
    shown = "\n".join(screen.lines()).replace("^Z\n[1]+ Stopped\n$ fg\n", "")
    whole = "\n".join(show(Screen(columns=16, rows=60), [text], monkeypatch))
    assert "".join(shown.split()) == "".join(whole.split())


def test_a_finished_block_is_written_once(monkeypatch):
    screen = Screen()
    made = printer(screen, monkeypatch)
    made.feed("first block\n\nsecond")
    written = len(screen.getvalue())
    for _ in range(50):
        made.feed(" word")
    made.finish()
    assert "first block" not in screen.getvalue()[written:]
    assert screen.lines()[:3] == ["first block", "", "second" + " word" * 10]


def test_a_block_taller_than_the_window_is_clipped_while_it_grows_and_printed_whole_at_the_end(monkeypatch):
    screen = Screen(rows=10)
    made = printer(screen, monkeypatch)
    made.feed("Before.\n\n")
    for i in range(200):
        made.feed(f"- line_{i}\n")
    assert not [line for line in screen.lines()[: -screen.terminal.lines] if "line_" in line]  # no scrap scrolled away
    assert "line_199" in "\n".join(screen.terminal.display)
    made.feed("\nAfter.")
    made.finish()
    lines = screen.lines()
    assert [line.strip(" •") for line in lines if "line_" in line] == [f"line_{i}" for i in range(200)]
    assert (lines[0], lines[-1]) == ("Before.", "After.")


def test_lines_of_code_are_printed_once_as_soon_as_they_are_whole(monkeypatch):
    screen = Screen(rows=10)
    made = printer(screen, monkeypatch)
    made.feed("Before.\n\n```python\n\n")
    for i in range(200):
        made.feed(f"\t# line_{i}\n")
        if i == 99:
            scrolled = "\n".join(screen.lines()[: -screen.terminal.lines])
            assert "line_85" in scrolled  # the scrollback has what the window does not
        made.feed("\n")
    assert screen.getvalue().count("# line_42") == 1
    made.feed("``")
    assert "``" not in "\n".join(screen.terminal.display)  # the end of the code, no line of it
    made.feed("`\n\nAfter.")
    made.finish()
    lines = screen.lines()
    assert [line.strip() for line in lines[2:-2:2]] == [f"# line_{i}" for i in range(200)]
    assert (lines[:2], lines[-2:]) == (["Before.", ""], ["", "After."])
    assert "\n\t\x1b[2m# line_199" in screen.getvalue()  # still highlighted, its tab kept


def test_code_is_written_without_padding_or_breaks_so_that_it_can_be_copied(monkeypatch):
    screen = Screen(20, 10)
    line = "x = [" + ", ".join(map(str, range(40))) + "]"
    show(screen, list(f"Look:\n```\n{line}\n```\n\n    {line}\n"), monkeypatch)
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", screen.getvalue())
    assert plain.count(f"\n{line}\n") == 2
    nested = show(Screen(), list("- item\n\n  ```\n  code\n  ```\n"), monkeypatch)
    assert nested == [" • item", "   code"]


def test_a_reply_that_goes_on_repeats_only_its_unfinished_block(monkeypatch):
    screen = Screen()
    made = printer(screen, monkeypatch)
    made.skip("One.\n\n```\na = 1\nb =")
    for piece in (" 2\n", "c = 3\n```\n", "\nTwo."):
        made.feed(piece)
    made.finish()
    assert screen.lines() == ["b = 2", "c = 3", "", "Two."]


def test_a_resize_leaves_no_row_behind_where_the_terminal_wraps_anew(monkeypatch):
    screen = Reflowing(60, 24)
    made = printer(screen, monkeypatch, reflows=True)
    made.feed("alpha block\n\n" + "gamma " * 30)
    for count, columns in enumerate((31, 17, 50), 31):
        screen.resize(columns)
        made.feed("gamma ")
        assert "\n".join(screen.lines()).split() == ["alpha", "block", *["gamma"] * count]


def test_a_line_of_thousands_of_characters_is_no_trouble(monkeypatch):
    screen = Screen(rows=10)
    lines = show(screen, ["x" * 97] * 60 + [" end"], monkeypatch)
    assert "".join(lines).replace(" ", "") == "x" * 97 * 60 + "end"


def test_a_resize_in_the_middle_loses_nothing_that_was_finished(monkeypatch):
    screen = Screen(60, 24)
    made = printer(screen, monkeypatch)
    made.feed("alpha block\n\nbeta block\n\n" + "gamma " * 30)
    for columns, rows in ((30, 24), (80, 24), (40, 30), (100, 40)):
        screen.terminal.resize(rows, columns)
        made.feed("gamma " * 5)
    made.feed("\n\nomega")
    made.finish()
    text = "\n".join(screen.lines())
    assert [text.count(block) for block in ("alpha block", "beta block", "omega")] == [1, 1, 1]
    assert text.count("gamma") >= 50


def test_thoughts_are_dimmed_and_the_tags_not_shown(monkeypatch):
    reply = "<think>\nHm, **let** me\nsee.\n\nYes.\n</think>\n\nThe *answer*."
    for parts in ([reply], list(reply), cut(reply, 3)):
        screen = Screen()
        assert show(screen, parts, monkeypatch) == ["Hm, **let** me", "see.", "", "Yes.", "", "The answer."]
        assert "\x1b[2mYes." in screen.getvalue()
        assert "\x1b[2mThe" not in screen.getvalue()
    # Where the template has written the opening tag.
    opened = show(Screen(), list("Hm.\n</think>\nNo."), monkeypatch, thinking=True)
    assert opened == ["Hm.", "", "No."]
    assert show(Screen(), list("<thin ice"), monkeypatch) == ["<thin ice"]
    assert show(Screen(), list("<think>unfinished"), monkeypatch) == ["unfinished"]


def test_rows_that_are_drawn_over_do_not_wrap(monkeypatch):
    """A family of four is one glyph or four, depending on the terminal."""
    screen = Screen(20, 10)
    made = printer(screen, monkeypatch)
    made.feed("first\n\n")
    for _ in range(30):
        made.feed("👨‍👩‍👧‍👦")
    assert len(made._drawn) <= 8
    made.feed("\n\nlast")
    made.finish()
    assert screen.lines()[0] == "first"
    assert screen.lines()[-1] == "last"


def test_code_without_a_fence_keeps_its_indents(monkeypatch):
    lines = show(
        Screen(), ["So:\ndef f(x):\n    if x:\n        return `1`\n- item\n  more **bold\n  text**"], monkeypatch
    )
    assert lines == ["So:", "def f(x):", "    if x:", "        return 1", "", " • item", "   more bold", "   text"]
