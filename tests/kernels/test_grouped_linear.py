"""grouped_linear.py: products with the weights of experts, in Triton's interpreter where there is no GPU, against
float64 products. ahead_of_time.py compiles them."""

import pytest
import torch
import torch.nn.functional as F

from nanopage.experts.activation import clamped_swiglu
from nanopage.experts.grouped_linear import group, grouped_options, most_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def expected_of(x, gate_up, down, chosen, weights, first, up_bias=None, down_bias=None, swiglu=None):
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    up_bias, down_bias = (torch.zeros(len(down), 1) if bias is None else bias for bias in (up_bias, down_bias))
    y = torch.zeros_like(x)
    for token, (experts, scales) in enumerate(zip(chosen.tolist(), weights.tolist(), strict=True)):
        for expert, scale in zip(experts, scales, strict=True):
            if first <= expert < first + len(gate_up):
                inner = gate_up[expert - first] @ x[token] + up_bias[expert - first]
                gate, up = inner.chunk(2)
                inner = F.silu(gate) * up if swiglu is None else clamped_swiglu(inner, *swiglu)
                y[token] += scale * (down[expert - first] @ inner + down_bias[expert - first])
    return y


def check(chosen, num_experts, hidden=48, inner=40, dtype=torch.float32, first=0, swiglu=None):
    """With `swiglu`, experts also have biases."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    x, gate_up, down = (
        normal(len(chosen), hidden) * 7,
        normal(num_experts, 2 * inner, hidden),
        normal(num_experts, hidden, inner),
    )
    weights = torch.rand(chosen.shape, generator=generator)
    given = [tensor.to(DEVICE) for tensor in (x, gate_up, down, chosen, weights)]
    more = () if swiglu is None else (normal(num_experts, 2 * inner), normal(num_experts, hidden), swiglu)
    on_device = (value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in more)
    y = torch.ops.nanopage.grouped_experts(*given, first, *on_device).cpu()
    expected = expected_of(x, gate_up, down, chosen, weights, first, *more)
    assert y.dtype == dtype and y.shape == x.shape
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()
    return y


def random_choice(num_tokens, num_chosen, num_experts):
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.stack([torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(num_tokens)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts", "hidden", "inner"),
    [(1, 2, 8, 64, 64), (1, 1, 1, 16, 8), (5, 3, 4, 130, 72), (100, 2, 4, 40, 66)],
)
def test_products_of_random_experts(num_tokens, num_chosen, num_experts, hidden, inner, dtype):
    """Sizes are not multiples of a tile. Four experts of 100 tokens have several blocks each."""
    check(random_choice(num_tokens, num_chosen, num_experts), num_experts, hidden, inner, dtype)


def test_experts_with_biases_and_a_clamped_activation():
    check(random_choice(30, 2, 6), 6, swiglu=(1.7, 0.8))
    check(random_choice(30, 2, 6), 2, first=2, dtype=torch.float16, swiglu=(0.5, 7.0))


def test_all_tokens_may_choose_one_expert_and_others_none():
    check(torch.full((70, 1), 2), 5)
    check(torch.tensor([[4, 0]] * 20), 5)


def test_experts_of_other_workers_add_nothing():
    chosen = random_choice(30, 2, 6)
    check(chosen, 2, first=2)
    assert not check(torch.zeros(4, 1, dtype=torch.int64), 2, first=4).any()


def test_blocks_cover_each_row_once():
    """Whatever the experts are: never more blocks than are launched, and no row in two of them."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(60):
        num_experts, num_chosen = 1 + trial % 7, 1 + trial % 3
        # Skewed, so that some experts have most rows and others have none.
        chosen = (torch.rand(1 + trial, num_chosen, generator=generator) ** 3 * (num_experts + 1)).long()
        groups = group(chosen, 1, num_experts, 4)
        assert len(groups.experts) == most_blocks(chosen.numel(), num_experts, 4)
        seen = []
        for expert, row in zip(groups.experts.tolist(), groups.rows.tolist(), strict=True):
            if expert < num_experts:
                pairs = groups.order[row : min(row + 4, int(groups.ends[expert]))]
                assert len(pairs) and (chosen.flatten()[pairs] == expert + 1).all()
                seen += pairs.tolist()
        mine = ((chosen >= 1) & (chosen <= num_experts)).flatten().nonzero().flatten()
        assert sorted(seen) == mine.tolist()


def test_the_compiler_sees_one_operator():
    experts = torch.randn(3, 8, 16, device=DEVICE), torch.randn(3, 16, 4, device=DEVICE)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(x, chosen, weights):
        return torch.ops.nanopage.grouped_experts(x, *experts, chosen, weights, 0) * 2

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=keep, fullgraph=True)
    for num_tokens in (2, 20):
        given = torch.randn(num_tokens, 16), random_choice(num_tokens, 2, 3), torch.rand(num_tokens, 2)
        given = [tensor.to(DEVICE) for tensor in given]
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 0)
        assert torch.equal(compiled(*given), run(*given))
    assert len(graphs) == 1


def test_more_rows_of_an_expert_make_larger_blocks():
    rows = [grouped_options(pairs, 8, torch.bfloat16, True)["ROWS"] for pairs in (2, 16, 8 * 20, 8 * 64, 8 * 500)]
    assert rows == [16, 16, 32, 64, 128]
    assert grouped_options(8 * 500, 8, torch.float32, True)["ROWS"] == 32


@pytest.mark.gpu
def test_a_graph_of_a_gpu_follows_the_experts_that_are_chosen():
    tensors = [torch.randn(shape, device="cuda").half() for shape in ((16, 64), (4, 96, 64), (4, 64, 48))]
    chosen, weights = random_choice(16, 2, 4).cuda(), torch.rand(16, 2, device="cuda")
    torch.ops.nanopage.grouped_experts(*tensors, chosen, weights, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.nanopage.grouped_experts(*tensors, chosen, weights, 0)
    for _ in range(3):
        chosen.copy_(torch.randint(0, 4, (16, 2)))
        graph.replay()
        assert torch.equal(y, torch.ops.nanopage.grouped_experts(*tensors, chosen, weights, 0))
