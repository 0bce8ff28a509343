"""A pool of 12 blocks while three requests run: who has which block in each step.

python docs/course/experiments/pool.py        # 12 blocks
python docs/course/experiments/pool.py 16     # or another number
"""

import sys

from dry import DryEngine

REQUESTS = {"A": (5, 16), "B": (5, 16), "C": (6, 16)}  # tokens of the prompt, and of the output


def run(requests: dict[str, tuple[int, int]] = REQUESTS, num_blocks: int = 12) -> list[tuple[str, list[str]]]:
    """The pool at each step: the owner of each block, or "." if it is free; and the names of the waiting requests."""
    engine = DryEngine(num_blocks, block_size=4, max_num_batched_tokens=8)
    for name, (prompt, output) in requests.items():
        engine.add(name, prompt, output)
    steps = []
    while engine.has_unfinished():
        engine.step()
        owners = {block: name for name, table in engine.tables.items() for block in table}
        waiting = [seq.request_id for seq in engine.scheduler.waiting]
        steps.append(("".join(owners.get(block, ".") for block in range(num_blocks)), waiting))
    return steps


def main(num_blocks: int) -> None:
    title = f"blocks 0 to {num_blocks - 1}"
    try:
        steps = run(num_blocks=num_blocks)
    except ValueError as error:  # a request that is longer than the pool
        sys.exit(f"error: {error}")
    print(f"step   {title}   waits")
    for number, (pool, waiting) in enumerate(steps, 1):
        print(f"{number:4}   {pool:{len(title)}}   {' '.join(waiting)}".rstrip())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
