"""What a GPU runs, on a CPU: static buffers without capture, and plain PyTorch in place of Triton kernels."""

from functools import partial

import torch

from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.kernels.reference import PLAIN
from nanopage.sampling.sampler import sample_rows
from nanopage.sampling.truncation import floors_among
from nanopage.state import pages
from nanopage.worker import cuda_graphs, jit
from nanopage.worker.cuda_graphs import CUDAGraphs, no_wrap


def make_sample_all(uses_triton=False, wrap=no_wrap):
    return cuda_graphs.make_sample_all(wrap) if uses_triton else partial(wrap(sample_rows), floors_by_sorting)


def floors_by_sorting(logits, rows, temperature, *limits):
    """As `kernels.floors.find_floors`."""
    logits, temperature = logits.to(torch.promote_types(logits.dtype, torch.float32)), temperature[rows]
    values = logits.sort(dim=-1, descending=True).values
    floors, _ = floors_among(values, logits, temperature, [limit[rows] for limit in limits])
    return torch.where(temperature > 0, floors.squeeze(1), -torch.inf)


def graphs_for(model, kv_cache, table, uses_triton=False, sample_all=None, **options):
    kind = CUDAGraphs if uses_triton else PlainGraphs
    return kind(model, kv_cache, table, sample_all or make_sample_all(uses_triton), **options)


class PlainGraphs(CUDAGraphs):
    """CUDAGraphs with attention in plain PyTorch."""

    splits = (1,)
    num_rows = 0  # that are not padding

    def run(self, batch):
        self.num_rows = len(batch.rows)
        return super().run(batch)

    def _choose_splits(self, seq_lens):
        return 1

    def _make_attention(self, slots, block_tables, seq_lens, num_splits):
        if seq_lens is None:
            return super()._make_attention(slots, block_tables, seq_lens, num_splits)
        count = self.num_rows
        lens = seq_lens[:count]
        padded = pages.pad_tables(block_tables[:count].numpy()[:, :, None], -(-lens.numpy() // self.table.block_size))
        tables = torch.from_numpy(padded[:, :, 0])
        return PaddedAttention(slots, GroupedAttention(slots[:count], tables, torch.ones_like(lens), lens))


class PaddedAttention:
    """Attention of decodes before padding: nothing is written for padding, and its attention is 0."""

    def __init__(self, slot_mapping, decodes):
        self.slot_mapping, self.decodes = slot_mapping, decodes

    def write(self, k, v, kv_cache, scales=(1.0, 1.0)):
        size = len(self.decodes.seq_lens)
        self.decodes.write(k[:size], v[:size], kv_cache, scales)

    def attend(self, q, kv_cache, scoring=PLAIN, out=None):
        size = len(self.decodes.seq_lens)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.decodes.attend(q[:size], kv_cache, scoring, out[:size])
        out[size:] = 0
        return out


def pieces_for(model, uses_triton=False):
    return jit.CompiledDecoder(model) if uses_triton else PlainPieces(model)


def compile_pieces(model, config, dtype, device):
    """As `jit.compile_model`."""
    compiled = PlainPieces(model)
    jit.warm_up(compiled, config, dtype, device)
    return compiled


class PlainPieces(jit.CompiledDecoder):
    """A CompiledDecoder with plain PyTorch between its pieces."""

    def place(self, part, heads, carried):
        step = carried.step
        q, k, v = part.rotated(heads, *step.rotations[part.rope])
        slots = step.attention_of(part).slot_mapping
        written = slots >= 0
        pages.write(k[written], v[written], step.kv_caches[part.index], slots[written], *part.scoring.kv_scales)
        carried.q.copy_(q)
