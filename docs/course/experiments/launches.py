"""How many operations a decode step of the default model takes, which a GPU would have to be told one by one.

python docs/course/experiments/launches.py
"""

from collections import Counter

from dry import Engine
from torch.utils._python_dispatch import TorchDispatchMode

from nanopage.weights import hub
from nanopage.worker.cuda_graphs import batch_sizes

VIEWS = ("view", "chunk", "flatten", "select", "unsqueeze", "slice", "to", "alias", "detach", "size")


class Count(TorchDispatchMode):
    """Counts the operations that would be kernels on a GPU. Views move no data."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.calls[name] += 1
        return function(*args, **(kwargs or {}))


def main() -> None:
    engine = Engine(hub.resolve(None), num_blocks=4, block_size=16, max_num_seqs=1, max_num_batched_tokens=16)
    engine.add_request("A", [1, 2, 3], max_tokens=3)
    engine.step()  # the prompt
    with Count() as count:
        engine.step()  # a decode
    total = sum(count.calls.values())
    print(f"one decode step: {total} operations, of which {count.calls['linear']} are products with weights")
    print(f"at 5 microseconds for each launch: {total * 5 / 1000:.1f} ms")
    print(f"\nsizes that nanopage captures with max_num_seqs=64: {batch_sizes(64)}")
    for size in (1, 3, 20, 50):
        padded = next(each for each in batch_sizes(64) if each >= size)
        print(f"  a step with {size:2} sequences replays the graph of {padded:2}: {padded - size:2} rows are padding")


if __name__ == "__main__":
    main()
