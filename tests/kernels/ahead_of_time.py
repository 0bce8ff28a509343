"""What test_triton.py runs in a process without Triton's interpreter: it compiles the kernels of wings for a GPU that
is not there, and traces the sampler around its kernel (floors.py)."""

from functools import partial
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernel_resources import resource_usage
from nanopage.adapters.kernels import lora_expand_kernel, lora_shrink_kernel
from nanopage.experts.grouped_linear import grouped_linear_kernel, grouped_options
from nanopage.recurrent.delta_kernel import delta_kernel, kernel_sizes
from nanopage.state.sampling_table import SamplingTable
from nanopage.worker import jit
from nanopage.worker.cuda_graphs import make_sample_all

KIB = 1024
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def compile_wings(architecture: int) -> None:
    """Raises: AssertionError if a kernel takes what the GPU lacks. Args: the compute capability, such as 90."""
    target = GPUTarget("cuda", architecture, 32)
    compile_adapters(target)
    compile_experts(target)
    compile_delta_rule(target)


def compile_adapters(target):
    for dtype in DTYPES.values():
        for kernel, pointers, constants in (
            (lora_shrink_kernel, {"x_ptr": dtype, "a_ptr": dtype, "h_ptr": "fp32"}, {"RANKS": 16, "INPUTS": 128}),
            (lora_expand_kernel, {"h_ptr": "fp32", "b_ptr": dtype, "y_ptr": dtype}, {"RANK": 16, "OUTPUTS": 64}),
        ):
            constants = constants | {"TOKENS": 16, "PRECISION": "tf32x3" if dtype == "fp32" else "ieee"}
            types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
            types |= {name: "*" + kind for name, kind in pointers.items()} | {"slots_ptr": "*i64"}
            assert triton.compile(ASTSource(kernel, types, constants), target=target).asm["cubin"]


def compile_experts(target):
    kernel = grouped_linear_kernel
    for dtype, from_tokens, pairs in (
        (torch.float32, True, 8),
        (torch.bfloat16, False, 8),
        (torch.bfloat16, True, 65536),
        (torch.float16, False, 65536),
    ):
        options = grouped_options(pairs, 128, dtype, True)
        launch = {key: options.pop(key) for key in ("num_warps", "num_stages")}
        constants = options | {"FROM_TOKENS": from_tokens, "BIAS": pairs == 8}
        types = {key: "constexpr" if key in constants else "i32" for key in kernel.arg_names}
        types |= dict.fromkeys(("order_ptr", "expert_ptr", "row_ptr", "end_ptr"), "*i64") | {"scale_ptr": "*fp32"}
        types |= dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), "*" + DTYPES[dtype])
        made = triton.compile(ASTSource(kernel, types, constants), target=target, options=launch)
        assert made.asm["cubin"] and made.metadata.shared <= 163 * KIB, made.metadata


def compile_delta_rule(target):
    """Without registers that spill."""
    for several in (True, False):
        sizes = kernel_sizes(32, 128, 128)
        options = {"num_warps": sizes.pop("num_warps")}
        constants = sizes | {"SEVERAL": several} | ({} if several else {"start_ptr": None, "kept_ptr": None})
        types = {key: "*fp32" if key.endswith("ptr") else "i64" for key in delta_kernel.arg_names}
        types |= dict.fromkeys(constants, "constexpr")
        indexes = [key for key in ("source_ptr", "target_ptr", "start_ptr", "kept_ptr") if key not in constants]
        types |= dict.fromkeys(indexes, "*i64") | dict.fromkeys(("num_sequences", "num_tokens", "part_heads"), "i32")
        made = triton.compile(ASTSource(delta_kernel, types, constants), target=target, options=options)
        usage = resource_usage(made.asm["cubin"])
        assert made.metadata.shared <= 48 * KIB and int(usage["STACK"]) == 0, usage


def trace_the_sampler() -> None:
    """The compiler sees one graph around the kernel of truncation, for any number of rows.

    Raises: AssertionError if it sees others: not one for each of two types, of one row and of several.
    """
    graphs, cpu = [], torch.device("cpu")

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)), FakeTensorMode():
        sample_all = make_sample_all(jit.compile_afresh)
        table = SamplingTable(9, 300, cpu)
        jit.warm_up_sampling(sample_all, table, torch.bfloat16, cpu)
        with torch.compiler.set_stance("fail_on_recompile"), torch.inference_mode():
            for size in (1, 2, 9):
                for dtype in (torch.bfloat16, torch.float32):
                    rows, positions = torch.empty(2, size, dtype=torch.int64)
                    logits = torch.empty(size, 300, dtype=dtype)
                    tokens = sample_all(logits, rows, positions, table.temperature, table.seed, table.limits)
                    assert tokens.shape == (size,) and tokens.dtype == torch.int64
    seen = [[str(node.target) for node in graph.graph.nodes if "nanopage" in str(node.target)] for graph in graphs]
    assert seen == [["nanopage.find_floors.default"]] * 4, seen
