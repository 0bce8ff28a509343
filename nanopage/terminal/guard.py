"""Finds a reply that repeats itself without end, as small models do.

A reply is read as words, numbers and signs. A word is expected if it stood before in the same place: after the same
three, two or one words, or two places behind the same word. A word after a number is also expected if it followed the
same two words and a number before, whatever signs stand between them. This finds a list that starts again: the words
before its "4. **" are the last words of its third item. A number is expected if it continues the count in its place. A
sentence or line with only one unexpected place counts as expected, unless this place is a large part of it. So the
guard finds exact loops, and also numbered lines, lines with one changing word, lists that start again, lists of "X:
same sentence", code that counts, and long paragraphs. A reply is a loop if nearly all of its last WINDOW words were
expected.

Lists of names, tables and markup have short lines that differ in one word. So the unexpected words of a line are
compared with its other words only, not with signs. In a line of over LINE words and signs, expected signs do not count
beyond this length.

A reply that goes round in circles has no such form ("I see you. You see me. I never see me."), but uses few words. So
prose is a loop, too, if its last PROSE words are at most FEW different words. Prose has few signs besides punctuation.

Of some 4,300 pieces of Python's own code, of licenses and of nanopage's code and documents, 4,000 characters each, four
are taken for loops: tests of Python, of which three are copies of one another and one has long names of a single
letter. The prose among the pieces has 58 different words or more.
"""

import re
from collections import Counter, deque

WINDOW = 240  # words
SHARE = 0.95  # expected share of these words in a loop
LONGEST_UNIT = 40  # words of a sentence or line
LINE = 5  # words and signs of a line; expected signs count only up to this length
LONGEST_WORD = 12  # characters; a longer word counts as several
PROSE, FEW = 200, 36  # words
FEW_SIGNS = PROSE // 10  # the most digits, brackets, operators and the like among these words
SENTENCE_SIGNS = frozenset(".,!?;:'\"’“”‘-\n")
WORD = re.compile(rf"(\S)\1{{3}}|\d{{1,9}}|[^\W\d_]{{1,{LONGEST_WORD}}}|[^\w\s]|_|\n")


class LoopGuard:
    """Reads a reply as it comes. The work per word does not depend on the length of the reply."""

    def __init__(self) -> None:
        self._rest = ""  # the end of the text, whose last word may go on
        self._next: dict[tuple, str] = {}  # place -> the last word in this place
        self._counts: dict[tuple, tuple[int, int | None]] = {}  # place -> its last number, and the last step
        self._last = ("", "", "")
        self._named = ("", "", "")  # the last words and numbers, without signs
        self._unit: list[tuple[str, bool]] = []  # words of the present sentence or line; expected?
        self._window: deque[bool] = deque(maxlen=WINDOW)
        self._expected = 0  # expected words in the window
        self._prose: deque[str] = deque()  # words and signs, as many as PROSE words take
        self._used: Counter[str] = Counter()  # how often each word is among them
        self._num_signs = 0  # signs among them

    def feed(self, text: str) -> bool:
        """Read on. Returns whether the reply has become a loop."""
        text = self._rest + text
        words = [word for word in WORD.finditer(text) if word.end() <= len(text) - LONGEST_WORD]
        self._rest = text[words[-1].end() if words else 0 :]
        found = [self._read(word[0]) | self._circles(word[0].lower()) for word in words]
        return any(found)

    def _read(self, word: str) -> bool:
        self._unit.append((word, self._is_expected(word)))
        if word not in (".", "!", "?", "\n") and len(self._unit) < LONGEST_UNIT:
            return False
        unit, self._unit = self._unit, []
        is_line = word == "\n"
        surprises = [i for i, (_, expected) in enumerate(unit) if not expected]
        in_one_place = not surprises or surprises[-1] - surprises[0] < len(surprises)
        length = sum(expected and each.isalpha() for each, expected in unit) if is_line else len(unit)
        forgiven = in_one_place and 3 * len(surprises) <= length
        spare = len(unit) - LINE if is_line else 0
        for each, expected in unit:
            if spare > 0 and expected and not each.isalnum():
                spare -= 1
                continue
            if len(self._window) == WINDOW:
                self._expected -= self._window[0]
            self._window.append(expected or forgiven)
            self._expected += self._window[-1]
        return len(self._window) == WINDOW and self._expected >= SHARE * WINDOW

    def _circles(self, word: str) -> bool:
        """Whether the last words are prose with few different words. `word` is the last word."""
        if word in SENTENCE_SIGNS:
            return False
        self._prose.append(word)
        self._used[word] += 1
        self._num_signs += not word.isalpha()
        while len(self._prose) - self._num_signs > PROSE:
            oldest = self._prose.popleft()
            self._used[oldest] -= 1
            self._num_signs -= not oldest.isalpha()
            if not self._used[oldest]:
                del self._used[oldest]
        full = len(self._prose) - self._num_signs == PROSE
        return full and self._num_signs <= FEW_SIGNS and len(self._used) <= FEW

    def _is_expected(self, word: str) -> bool:
        """Whether a word was expected. Remembers it."""
        number = int(word) if word.isdecimal() else None
        word = "0" if number is not None else word
        first, second, third = self._last
        places: list[tuple] = [(first, second, third), (second, third), (third,), (second, None)]
        if word.isalnum() and self._named[-1] == "0":
            places.append((*self._named, None))
        expected = any(self._next.get(place) == word for place in places)
        if number is not None:
            before = [self._counts.get(place) for place in places]
            expected = expected and any(count is not None and number - count[0] == count[1] for count in before)
            for place, count in zip(places, before, strict=True):
                self._counts[place] = number, None if count is None else number - count[0]
        self._next |= dict.fromkeys(places, word)
        self._last = second, third, word
        if word.isalnum():
            self._named = (*self._named[1:], word)
        return expected
