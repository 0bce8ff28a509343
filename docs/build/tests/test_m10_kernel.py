import pytest
import torch
from built import attention
from built.generate import generate
from built.kernel import paged_attention


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(2, 1, 16, 4), (6, 2, 32, 8)])
def test_the_kernel_computes_what_the_reference_does(heads, kv_heads, head_dim, block_size):
    keys, values = torch.randn(2, 9, block_size, kv_heads, head_dim).unbind()
    keys[3] = values[3] = torch.nan  # a block that is in no table, or behind the end of a sequence
    tables = torch.tensor([[5, 2, 3], [0, -1, -1], [7, 1, 4]])
    rows, positions = torch.tensor([0, 0, 1, 2]), torch.tensor([block_size, block_size + 1, 0, 3 * block_size - 1])
    q = torch.randn(4, heads, head_dim)
    out = paged_attention(q, keys, values, tables, rows, positions)
    tables[0, 2] = 6
    torch.testing.assert_close(out, attention.paged_attention(q, keys, values, tables, rows, positions))


def test_an_engine_with_the_kernel_gives_the_same_tokens(model, prompts, start, run):
    engine = start(max_num_batched_tokens=4)
    engine.attention = paged_attention
    (prompt,) = prompts([6])
    engine.add_request("A", prompt, max_tokens=2)
    assert run(engine)["A", 0] == generate(model, prompt, 2)
