"""Shows which resources of a GPU the Triton kernels take, by compiling them ahead of time. No GPU is needed.

    python -m benchmarks.kernel_resources          the specializations of common models, as a table
    python -m benchmarks.kernel_resources every    also the specializations of uncommon models
    python -m benchmarks.kernel_resources few      each kernel once in each dtype, for a quick test

Registers and stack are read from the cubin. A stack means that registers were spilled.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from triton.backends.compiler import GPUTarget

from benchmarks.report import show_table, table_of
from nanopage.kernels import attention_kernels, cache_write, floors, paged_attention, rotate_and_write
from nanopage.kernels.reference import Scoring
from nanopage.quantization import quantized_linear

ARCHITECTURES = (75, 80, 90, 100)
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
KEEPING = ("write_kernel", "rotate_kernel", "decode_kernel", "prefill_kernel")  # kernels that write or read the cache
ATTENDING = ("decode_kernel", "prefill_kernel")
VOCAB_SIZE = 151_936  # Qwen3's
SHARED = {75: 64, 80: 163, 90: 227, 100: 227}  # KiB that a program may take


@dataclass(frozen=True)
class Specialization:
    """A kernel as the engine launches it: for a model's heads, dtype and page size."""

    kernel: str
    dtype: torch.dtype
    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    split: bool = True
    cache: str = ""  # "fp8" if K and V are kept in it; else they are in `dtype`
    sinks: bool = False


@dataclass(frozen=True)
class Product:
    """The kernel for products with quantized weights, as the engine launches it."""

    weights: str  # a key of WEIGHTS
    dtype: torch.dtype
    tokens: int
    bias: bool = False


# Quantization -> bits, inputs in a group (0: all), whether there are offsets, whether offsets are zero points.
WEIGHTS = {
    "awq": (4, 128, True, True),  # and gptq
    "gptq 8": (8, 128, True, True),
    "int4": (4, 32, True, False),  # and q4_0, q4_1, q4_k
    "q5_k": (8, 32, True, False),  # and q5_1
    "q8_0": (8, 32, False, False),  # and q5_0
    "q6_k": (8, 16, False, False),
    "int8": (8, 0, False, False),
    "fp8": (8, 0, False, False),
}


@dataclass(frozen=True)
class Resources:
    registers: int  # of a thread
    stack: int  # bytes of a thread
    shared: int  # bytes of a program


def common() -> Iterator[Specialization]:
    """Specializations for Llama-like models: heads of 64 and 128, pages of 16."""
    for dtype in DTYPES:
        for head_dim in (64, 128):
            yield Specialization("write_kernel", dtype, head_dim)
            yield Specialization("rotate_kernel", dtype, head_dim)
            yield Specialization("decode_kernel", dtype, head_dim)
            yield Specialization("merge_kernel", dtype, head_dim)
            yield Specialization("prefill_kernel", dtype, head_dim)
            for kernel in KEEPING if dtype != torch.float32 else ():
                yield Specialization(kernel, dtype, head_dim, cache="fp8")
        yield Specialization("floor_kernel", dtype)


def few() -> Iterator[Specialization]:
    """Each kernel in each dtype, and with a cache in fp8, there also with sinks."""
    for dtype, head_dim in ((torch.float32, 128), (torch.float16, 64), (torch.bfloat16, 128)):
        for kernel in (*KEEPING, "merge_kernel"):
            yield Specialization(kernel, dtype, head_dim)
        yield Specialization("floor_kernel", dtype)
    for kernel in KEEPING:
        yield Specialization(kernel, torch.float16, cache="fp8", sinks=kernel in ATTENDING)


def every() -> Iterator[Specialization]:
    """`common`, and further head sizes, page sizes, groups, windows and caps."""
    yield from common()
    for dtype in DTYPES:
        for head_dim in (80, 96, 256):
            for kernel in ("write_kernel", "rotate_kernel", "decode_kernel", "merge_kernel", "prefill_kernel"):
                yield Specialization(kernel, dtype, head_dim)
        for kernel in ("decode_kernel", "prefill_kernel"):
            for block_size in (8, 32, 256):
                yield Specialization(kernel, dtype, block_size=block_size)
            for group in (1, 2, 3, 7, 8):
                yield Specialization(kernel, dtype, group=group)
            yield Specialization(kernel, dtype, window=4096)
            yield Specialization(kernel, dtype, softcap=50.0)
            yield Specialization(kernel, dtype, split=False)
            yield Specialization(kernel, dtype, 64, 8, window=128, sinks=True)  # GPT-OSS
        yield Specialization("normed_kernel", dtype)
        if dtype != torch.float32:
            for kernel in KEEPING:
                yield Specialization(kernel, dtype, 256, cache="fp8")
            for kernel in ("decode_kernel", "prefill_kernel"):
                yield Specialization(kernel, dtype, window=4096, cache="fp8")


def products(which: str) -> Iterator[Product]:
    """Products of one token and of many tokens; with "every", also of numbers between. "few": each kind and dtype."""
    if which == "few":
        for weights, dtype in (("awq", torch.bfloat16), ("int4", torch.float16), ("int8", torch.bfloat16)):
            yield from (Product(weights, dtype, tokens) for tokens in (1, 2048))
        yield Product("fp8", torch.float16, 2048)
        yield Product("fp8", torch.float32, 1)
        return
    for dtype in DTYPES:
        for weights in WEIGHTS if which == "every" else ("awq", "int4", "int8", "fp8"):
            for tokens in (1, 32, 64, 2048) if which == "every" else (1, 2048):
                yield Product(weights, dtype, tokens, bias=which == "every")


def compile_product(one: Product, architecture: int) -> Resources:
    """Raises as `compile_ahead`."""
    bits, group, offsets, zero_points = WEIGHTS[one.weights]
    stored = torch.float8_e4m3fn if one.weights == "fp8" else torch.uint8
    constants = quantized_linear.linear_options(one.tokens, one.dtype, stored, bits, group, architecture >= 80)
    constants |= {"OFFSETS": offsets, "ZERO_POINTS": zero_points, "BIAS": one.bias}
    data, scales = "*" + DTYPES[one.dtype], "*fp16" if group else "*fp32"
    types = {"x_ptr": data, "packed_ptr": "*u8", "scale_ptr": scales, "offset_ptr": scales, "bias_ptr": data}
    types["out_ptr"] = data if one.bias else "*fp32"  # a bias is added to the whole sum, not to a split's sum
    return compile_for(quantized_linear.linear_kernel, constants, types, quantized_linear.VARYING, architecture)


def compile_ahead(one: Specialization, architecture: int) -> Resources:
    """Raises what Triton raises if it does not compile."""
    rotates = one.kernel in ("rotate_kernel", "normed_kernel")  # normed_kernel is rotate_kernel with norms of the heads
    modules = {"write_kernel": cache_write, "floor_kernel": floors}
    module = modules.get(one.kernel, attention_kernels)
    kernel: Any = rotate_and_write.rotate_kernel if rotates else getattr(module, one.kernel)
    q = torch.empty(1, one.group, one.head_dim, dtype=one.dtype, device="meta")
    kv_dtype = torch.float8_e4m3fn if one.cache else one.dtype
    cache = torch.empty(2, 1, 1, one.head_dim * one.block_size, dtype=kv_dtype, device="meta")
    scoring = Scoring(one.window, softcap=one.softcap, sinks=q if one.sinks else None)
    shape = q, cache, scoring, one.split, architecture
    if one.kernel == "write_kernel":
        constants = cache_write.write_options(q, cache)
    elif one.kernel == "floor_kernel":
        constants = floors.floor_options(torch.empty(1, VOCAB_SIZE, dtype=one.dtype, device="meta"))
    elif rotates:
        heads = torch.empty(1, one.group + 2, one.head_dim, dtype=one.dtype, device="meta")
        constants = rotate_and_write.rotate_options(
            heads, cache, heads.shape[2], 1e-6 if one.kernel == "normed_kernel" else None
        )
    elif one.kernel == "prefill_kernel":
        constants = paged_attention.prefill_options(*shape)
    elif one.kernel == "decode_kernel":
        constants = paged_attention.decode_options(*shape)
    else:
        constants = paged_attention.merge_options(q)
    data = "*" + DTYPES[one.dtype]
    types = {"k_ptr": data, "sink_ptr": data, "v_ptr": data, "q_ptr": data, "out_ptr": data, "slot_ptr": "*i64"}
    types["cache_ptr"] = "*fp8e4nv" if one.cache else data
    types |= dict.fromkeys(("heads_ptr", "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr"), data)
    types |= {"table_ptr": "*i32", "seq_len_ptr": "*i32", "query_start_ptr": "*i32"}
    types |= {"logits_ptr": data, "rows_ptr": "*i64", "top_k_ptr": "*i64"}
    types |= dict.fromkeys(("temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp64")
    if one.kernel == "floor_kernel":
        types["out_ptr"] = "*fp32"
    types |= {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "num_splits": "i32"}
    types |= dict.fromkeys(("k_scale", "v_scale", "k_factor", "v_factor"), "fp32")
    varying = attention_kernels.VARYING | {"tables": floors.TABLES}
    return compile_for(kernel, constants, types, varying, architecture)


def compile_for(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], varying: dict[str, list[str]], architecture: int
) -> Resources:
    """Args: types: the types of arguments that are not int32. varying: arguments that are not specialized."""
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        # As at launch: addresses and strides are multiples of 16, but nothing is known about values that vary.
        varies = [name for names in varying.values() for name in names]
        if signature[name] not in ("constexpr", "fp32") and name not in varies:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage = resource_usage(compiled.asm["cubin"])
    return Resources(int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), compiled.metadata.shared)


def resource_usage(cubin: bytes) -> dict[str, str]:
    """Resource usage by NVIDIA's cuobjdump, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    which: Annotated[str, typer.Argument(help="few, common or every.")] = "common",
    architecture: Annotated[int | None, typer.Argument(help="75, 80, 90 or 100 [default: all].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compile the Triton kernels, without a GPU, and print what they take of one."""
    kinds = {"few": few, "common": common, "every": every}
    if which not in kinds:
        raise typer.BadParameter(f"{which!r} is not one of: {', '.join(kinds)}")
    if architecture is not None and architecture not in ARCHITECTURES:
        raise typer.BadParameter(f"{architecture} is not one of: {', '.join(map(str, ARCHITECTURES))}")
    targets = ARCHITECTURES if architecture is None else (architecture,)
    rows = []
    product_rows = []
    for target in targets:
        for one in kinds[which]():
            if target >= (89 if one.cache else 80 if one.dtype == torch.bfloat16 else 0):  # earlier GPUs have none
                rows.append(asdict(one) | named(one.dtype, target) | asdict(compile_ahead(one, target)))
        for product in products(which):
            if target >= 80 or product.dtype != torch.bfloat16:
                row = {"kernel": "linear_kernel"} | asdict(product) | named(product.dtype, target)
                product_rows.append(row | asdict(compile_product(product, target)))
    if as_json:
        print(json.dumps(rows + product_rows))
        return
    for found in (rows, product_rows):
        columns = [{"registers": "regs", "softcap": "cap"}.get(name, name.replace("_", " ")) for name in found[0]]
        table = table_of("Registers and stack (bytes) of a thread, shared memory (bytes) of a program", columns)
        table.padding = 0  # there are thirteen columns
        for row in found:
            table.add_row(row.pop("kernel").removesuffix("_kernel"), *map(str, row.values()))
        show_table(table)


def named(dtype: torch.dtype, target: int) -> dict[str, Any]:
    return {"dtype": DTYPES[dtype], "sm": target}


if __name__ == "__main__":
    app()
