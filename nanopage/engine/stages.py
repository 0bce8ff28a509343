"""Running groups that sit a step out because tokens are in flight: with pipeline stages, and with masks."""

from nanopage.engine.sequence import SequenceGroup


def find_held(running: list[SequenceGroup], num_stages: int) -> dict[SequenceGroup, str]:
    """The running groups that the next step leaves out, and why.

    "mask", "stage": their next step depends on tokens in flight. "share": the batch has its share of the groups, and
    the other stages get the rest.
    """
    held = {}
    share = -(-len(running) // num_stages)
    for group in running:
        if num_stages > 1 and share == 0:
            held[group] = "share"
        elif any(seq.num_in_flight if num_stages > 1 else seq.awaits_tokens for seq in group.live):
            held[group] = "stage" if num_stages > 1 else "mask"
        else:
            share -= 1
    return held
