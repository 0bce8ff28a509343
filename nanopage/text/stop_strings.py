"""Stop strings: the first of several strings to appear in a text that arrives piece by piece.

Aho and Corasick's automaton (1975): a trie of the strings, where each node also has a link to the node of its longest
proper suffix. A search holds one node, that of the longest end of the text that may begin a string. So a text of n
characters costs at most 2n lookups, however many strings there are and however much they repeat themselves.
"""


class StopStrings:
    """The automaton of some strings. Searches do not change it, so they can share it.

    edges      (node, character) -> node; node 0 is the root
    links      node -> the node of its longest proper suffix
    endings    node -> the longest of the strings that it ends with, or ""
    held       node -> how many characters at its end may be the beginning of a string
    """

    def __init__(self, strings: list[str]):
        self.edges: dict[tuple[int, str], int] = {}
        self.endings, depths = [""], [0]
        for string in strings:
            node = 0
            for character in string:
                following = self.edges.setdefault((node, character), len(depths))
                if following == len(depths):
                    depths.append(depths[node] + 1)
                    self.endings.append("")
                node = following
            self.endings[node] = string
        self.links, self.held = [0] * len(depths), [0] * len(depths)
        inner = {parent for parent, _ in self.edges}
        # A link leads to a node of less depth.
        for (parent, character), node in sorted(self.edges.items(), key=lambda edge: depths[edge[1]]):
            link = self.follow(self.links[parent], character) if parent else 0
            self.links[node] = link
            self.endings[node] = self.endings[node] or self.endings[link]
            self.held[node] = depths[node] if node in inner else self.held[link]

    def follow(self, node: int, character: str) -> int:
        """The node after one more character."""
        while (following := self.edges.get((node, character))) is None and node:
            node = self.links[node]
        return following or 0


class StopStringSearch:
    """A search in one text."""

    def __init__(self, strings: StopStrings):
        self.strings = strings
        self.length = 0  # of the text so far
        self._node = 0

    @property
    def begun(self) -> int:
        """Where the earliest unfinished match begins; without one, the text's length."""
        return self.length - self.strings.held[self._node]

    def feed(self, text: str, search: bool = True) -> tuple[int, str] | None:
        """Append `text`. Returns (where it begins, string) for the string that ends first; if several end at the same
        place, for the longest. Ignores strings that end while `search` is false."""
        for character in text:
            self.length += 1
            self._node = self.strings.follow(self._node, character)
            if search and (found := self.strings.endings[self._node]):
                return self.length - len(found), found
        return None
