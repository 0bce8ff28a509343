"""Ranks: how the workers of one engine exchange tensors. The only file that imports torch.distributed.

The workers of a stage (tensor parallelism) add up partial sums and gather logits. Adjacent stages (pipeline
parallelism) pass on hidden states. The rank of a worker is stage * tensor_parallel_size + its rank within the stage.
Sampled tokens are not exchanged: the engine sends them with the next Batch, so that workers never disagree about them.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.distributed.exchanged import Received, SlicedWeight, Summed
from nanopage.distributed.part import Part, keep_layers, sums
from nanopage.models.decoder import Decoder
from nanopage.step import Batch
from nanopage.worker.eager import Output
from nanopage.worker.model_runner import Way

TIMEOUT = timedelta(minutes=10)  # for an exchange. The executor notices a hung worker earlier


def part_of(config: EngineConfig, rank: int) -> Part:
    """The part of the model that the worker `rank` has."""
    pp_rank, tp_rank = divmod(rank, config.tensor_parallel_size)
    sizes = config.tensor_parallel_size, pp_rank, config.pipeline_parallel_size
    return Part(tp_rank, *sizes, config.enable_expert_parallel)


class Ranks:
    """Connects a worker with the other workers of its engine, one engine in a process.

    Args:
        part: the part of the model that the worker has.
        address: where the workers meet: `init_method` of torch.distributed.
        device: the device of the exchanged tensors.

    Raises: RuntimeError if the workers do not meet.
    """

    def __init__(self, part: Part, address: str, device: torch.device):
        self.part, self.device = part, device
        self.rank, size = part.pp_rank * part.tp_size + part.tp_rank, part.tp_size * part.pp_size
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=size, timeout=TIMEOUT)
        # Every rank has to take part in making each group.
        stages = [list(range(first, first + part.tp_size)) for first in range(0, size, part.tp_size)]
        self.stage = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in stages][part.pp_rank]
        self.hidden_size, self.vocab_size, self.dtype = 0, 0, torch.float32  # set by `connect`
        self._sending: tuple[dist.Work | None, Tensor] | None = None

    def connect(self, model: Decoder, whole: ModelConfig, dtype: torch.dtype) -> None:
        """Put exchanges into a part of a model that is loaded, and number its layers from 0.

        Args:
            whole: the shape of the whole model.
            dtype: the dtype of activations.
        """
        part = self.part
        self.hidden_size, self.vocab_size, self.dtype = whole.hidden_size, whole.vocab_size, dtype
        if part.tp_size > 1:
            for place, _ in sums(part.model(whole), whole):
                owner, _, name = place.rpartition(".")
                module = model.get_submodule(owner)
                setattr(module, name, Summed(getattr(module, name), self.add_up))
            size = whole.vocab_size // part.tp_size
            mine = part.tp_rank * size, size, self.add_up, self.gather
            if part.is_first:
                model.embed_tokens.weight = SlicedWeight(model.embed_tokens.weight, *mine)
            if part.is_last:
                model.lm_head.weight = SlicedWeight(model.lm_head.weight, *mine)
                model.lm_head.out_features = whole.vocab_size
        if not part.is_last:
            model.lm_head = None  # type: ignore[assignment]
        if not part.is_first:
            setattr(model, "embed_tokens", Received(self.receive))  # noqa: B010
            model.embedding_scale = 1.0  # the first stage has multiplied by it
        keep_layers(model)

    def add_up(self, x: Tensor) -> Tensor:
        """Sum a contiguous tensor over the workers of the stage, in place, and return it."""
        dist.all_reduce(x, group=self.stage)
        return x

    def gather(self, logits: Tensor) -> Tensor:
        """Gather logits [T, vocab_size / tp_size] on the first worker of the stage: [T, vocab_size]. Other workers get
        zeros."""
        parts = [torch.empty_like(logits) for _ in range(self.part.tp_size)] if self.part.tp_rank == 0 else None
        dist.gather(logits, parts, dst=self.rank - self.part.tp_rank, group=self.stage)
        if parts is None:
            return logits.new_zeros(len(logits), self.vocab_size)
        return torch.cat(parts, dim=1)

    def send(self, hidden: Tensor) -> None:
        """Send hidden states [T, hidden_size] to the next stage, without waiting until it receives them."""
        if self._sending is not None:
            work, _ = self._sending
            if work is not None:
                work.wait()
        hidden = hidden.contiguous()
        self._sending = dist.isend(hidden, self.rank + self.part.tp_size), hidden

    def receive(self, num_tokens: int) -> Tensor:
        """Wait for the hidden states of `num_tokens` tokens from the previous stage: [num_tokens, hidden_size]."""
        hidden = torch.empty(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        dist.recv(hidden, self.rank - self.part.tp_size)
        return hidden

    def close(self) -> None:
        dist.destroy_process_group()


class PartialWay:
    """A way to run steps on a part of a model. Only the worker that samples gets logits to sample from."""

    def __init__(self, way: Way, ranks: Ranks):
        self.way, self.ranks = way, ranks

    def fits(self, batch: Batch) -> bool:
        return self.way.fits(batch)

    def run(self, batch: Batch) -> Output:
        output = self.way.run(batch)
        if not self.ranks.part.is_last:
            assert output.hidden is not None
            self.ranks.send(output.hidden)
            return Output(None)
        return output if self.ranks.part.samples else Output(None, output.hidden)
