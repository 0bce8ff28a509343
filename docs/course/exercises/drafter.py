"""Exercise of chapter 7: drafts from the answers to other requests.

    pytest -x docs/course/exercises/test_drafter.py

`NgramDrafter` (nanopage/speculation/lookup.py) guesses from a sequence's own tokens. But users ask the same things
again and again, and the answers resemble each other. So remember what has followed what in all answers so far.

Fill in two methods of `Followers`. AnswerDrafter below makes a `Drafter` of it, which any engine takes
(nanopage/speculation/drafts.py). Whatever you guess, answers stay the same: wrong guesses only cost time.
"""

from collections import Counter

from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence
from nanopage.outputs import StepStats

Context = tuple[int, int]
"""Two tokens, one after the other."""


class Followers:
    """Which tokens have followed two tokens, in all texts so far.

    counts: (the two tokens) -> how often each token has followed them.
    """

    def __init__(self) -> None:
        self.counts: dict[Context, Counter[int]] = {}

    def add(self, token_ids: list[int]) -> None:
        """Count each token of a text but the first two, for the two tokens before it."""
        raise NotImplementedError("exercise 7")

    def draft(self, token_ids: list[int], most: int) -> list[int]:
        """Guess up to `most` tokens that follow a text: the token that has followed its last two tokens most often,
        then the one that has followed the last of them and that guess most often, and so on. The guess ends where two
        tokens were never seen. Of tokens that are equally frequent, take the one that was counted first."""
        raise NotImplementedError("exercise 7")


class AnswerDrafter:
    """A `Drafter` from the sequences that have ended.

    Args: most: tokens of a draft.
    """

    def __init__(self, most: int = 4):
        self.followers, self.most = Followers(), most
        self.known: set[Sequence] = set()  # sequences that have been drafted for and have not ended
        self.num_drafted = self.num_accepted = 0

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> dict[Sequence, list[int]]:
        self._take_ended()
        self.known |= set(decodes)
        return {seq: draft for seq in decodes if (draft := self.followers.draft(seq.token_ids, self.most))}

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def observe(self, stats: StepStats) -> None:
        """It does not ask what a step costs."""

    def rest(self) -> None:
        self._take_ended()

    def restart(self) -> None:
        """What it knows depends on nothing but tokens."""

    def _take_ended(self) -> None:
        for seq in sorted((seq for seq in self.known if seq.finished), key=lambda seq: seq.seq_id):
            self.followers.add(seq.token_ids)
            self.known.remove(seq)
