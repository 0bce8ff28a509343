"""Exercise of chapter 11, solved."""

from hashlib import sha256

from nanopage.step import Item


def keys_of(token_ids: list[int], items: list[Item]) -> list[int]:
    """What the prefix cache compares in place of the token ids. Rules as in the exercise."""
    keys = list(token_ids)
    for item in items:
        for index in range(item.length):
            digest = sha256(item.hash + index.to_bytes(8, "little")).digest()
            keys[item.position + index] = -1 - int.from_bytes(digest[:8], "little") // 2  # 63 bits
    return keys


def chunk(start: int, most: int, items: list[Item], budget: int) -> int:
    """How many of a prompt's tokens, from `start` on, the next step computes. Rules as in the exercise."""
    count, used = most, 0
    for item in items:
        before = item.position - start
        if not 0 <= before < count:
            continue
        if used and used + item.cost > budget:
            return before
        if item.whole and before + item.length > count:
            return before or item.length
        used += item.cost
    return count
