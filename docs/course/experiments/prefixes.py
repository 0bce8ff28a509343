"""Four requests, of which three begin with the same 8 tokens: the block tables, the prefix cache, an eviction.

python docs/course/experiments/prefixes.py
"""

from dataclasses import dataclass

from nanopage.engine.block_manager import BlockManager

SYSTEM = list(range(100, 108))  # what chats begin with: two blocks of 4 tokens
REQUESTS = {
    "A": [*SYSTEM, 1, 2, 3, 4, 5],
    "B": [*SYSTEM, 1, 2, 3, 4, 9, 9],
    "C": [*SYSTEM, 7, 7, 7],
    "D": [50, 51, 52, 53, 54, 55, 56, 57, 58],
}


@dataclass
class State:
    """After a request has begun or ended: all tables, and the state of each block."""

    what: str
    tables: dict[str, list[int]]
    blocks: list[str]  # "free", "cached", or how many tables have it


def run(num_blocks: int = 6) -> list[State]:
    manager = BlockManager(num_blocks, block_size=4)
    ids = {name: number for number, name in enumerate(REQUESTS)}
    states = []

    def start(name: str) -> None:
        tokens = REQUESTS[name]
        hit = manager.allocate(ids[name], manager.lookup(tokens))
        if not manager.grow(ids[name], hit, len(tokens)):
            raise RuntimeError("the pool is too small")
        manager.register(ids[name], tokens, len(tokens))  # as if a step had computed them
        note(f"{name} begins: {hit} of {len(tokens)} tokens were cached")

    def end(name: str) -> None:
        manager.free(ids[name])
        note(f"{name} ends")

    def note(what: str) -> None:
        tables = {name: list(manager.block_tables[ids[name]]) for name in ids if ids[name] in manager.block_tables}
        states.append(State(what, tables, [state_of(block) for block in range(num_blocks)]))

    def state_of(block: int) -> str:
        if manager.ref_counts[block]:
            return str(manager.ref_counts[block])
        return "cached" if block in manager.prefixes.cached else "free"

    start("A")
    start("B")
    end("A")
    start("C")
    end("B")
    start("D")
    end("C")
    end("D")
    return states


def main() -> None:
    for state in run():
        print(state.what)
        for name, table in state.tables.items():
            print(f"    {name}: {table}")
        print(f"    blocks: {' '.join(state.blocks)}")


if __name__ == "__main__":
    main()
