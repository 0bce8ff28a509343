"""Stop strings: the first of several strings to appear in a text that arrives piece by piece.

The strings are kept as a trie. A search remembers each place where a string may have begun and the node that the text
since then has reached, so a character costs one lookup for each such place, however many strings there are.
"""

from __future__ import annotations

Node = dict  # character -> Node; a node that ends a string has it under END
END = ""


def build_trie(strings: list[str]) -> Node:
    """The trie of some strings. Searches do not change it, so they can share it."""
    root: Node = {}
    for string in strings:
        node = root
        for character in string:
            node = node.setdefault(character, {})
        node[END] = string
    return root


class StopStringSearch:
    """A search in one text. `begun` is where the earliest unfinished match begins; without one, the text's length."""

    def __init__(self, trie: Node):
        self.trie = trie
        self.length = 0  # of the text so far
        self._partial: list[tuple[int, Node]] = []  # (where a string may begin, node reached), in order

    @property
    def begun(self) -> int:
        return self._partial[0][0] if self._partial else self.length

    def feed(self, text: str, search: bool = True) -> tuple[int, str] | None:
        """Append `text`. Returns (where it begins, string) for the string that ends first; if several end at the same
        place, for the longest. Ignores strings that end while `search` is false."""
        for character in text:
            places = [*self._partial, (self.length, self.trie)]
            self.length += 1
            self._partial = [(begin, node[character]) for begin, node in places if character in node]
            if search:
                for begin, node in self._partial:
                    if END in node:
                        return begin, node[END]
            self._partial = [(begin, node) for begin, node in self._partial if len(node) > (END in node)]
        return None
