"""Texts that a model continues, all at once: what each step computes, and which blocks each sequence has.

python docs/course/experiments/steps.py "The capital of France is" "Once upon a time,"
"""

import sys

from dry import Engine, Sequence
from torch import Tensor

from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub


class Watched(Engine):
    """Prints what each step has computed."""

    tokenizer: Tokenizer
    number = 0

    def update(self, batch: list[tuple[Sequence, int]], logits: Tensor) -> dict[tuple[str, int], list[int]]:
        new = super().update(batch, logits)
        self.number += 1
        for seq, num_tokens in batch:
            text = self.tokenizer.decode(seq.token_ids[seq.num_computed - num_tokens : seq.num_computed])
            where = f"blocks {seq.block_table}" if seq.block_table else "ends"
            print(f"step {self.number:2}: {seq.request_id} computes {text!r}, {where}")
        for seq in self.scheduler.waiting:
            print(f"step {self.number:2}: {seq.request_id} waits with {len(seq.token_ids)} tokens")
        return new


def main(texts: list[str]) -> None:
    path = hub.resolve(None)  # SmolLM2-135M-Instruct
    engine = Watched(path, num_blocks=12, block_size=4, max_num_seqs=16, max_num_batched_tokens=8)
    engine.tokenizer = Tokenizer(path)
    outputs = {chr(ord("A") + number): engine.tokenizer.encode(text) for number, text in enumerate(texts)}
    for name, prompt in outputs.items():
        engine.add_request(name, prompt, max_tokens=16, stop_ids=engine.model.end_ids)
    while engine.has_unfinished():
        for (name, _), tokens in engine.step().items():
            outputs[name] = outputs[name] + tokens
    for name, token_ids in outputs.items():
        print(f"\n{name}: {engine.tokenizer.decode(token_ids)}")
    print(f"\n{engine.number} steps, {engine.scheduler.num_preemptions} preemptions")


if __name__ == "__main__":
    main(sys.argv[1:] or ["The capital of France is", "Once upon a time,", "def fibonacci(n):"])
