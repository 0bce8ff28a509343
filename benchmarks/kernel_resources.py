"""What the Triton kernels take of a GPU, by compiling them ahead of time. No GPU is needed.

    python -m benchmarks.kernel_resources          the specializations of common models, as a table
    python -m benchmarks.kernel_resources every    and those of uncommon ones

Registers and stack are read from the cubin; a stack means that registers were spilled.
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
from nanopage.kernels import cache_write, paged_attention, rotate_and_write

ARCHITECTURES = (75, 80, 90, 100)
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
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
    norms: bool = False


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


def every() -> Iterator[Specialization]:
    """Head sizes, page sizes, groups, windows and caps, beside `common`."""
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
        yield Specialization("decode_kernel", dtype, split=False)
        yield Specialization("rotate_kernel", dtype, norms=True)


def compile_ahead(one: Specialization, architecture: int) -> Resources:
    """Raises what Triton raises if it does not compile."""
    module = {"write_kernel": cache_write, "rotate_kernel": rotate_and_write}.get(one.kernel, paged_attention)
    kernel: Any = getattr(module, one.kernel)
    q = torch.empty(1, one.group, one.head_dim, dtype=one.dtype, device="meta")
    cache = torch.empty(2, 1, 1, one.head_dim * one.block_size, dtype=one.dtype, device="meta")
    shape = q, cache, one.window, one.head_dim**-0.5, one.softcap
    fast = architecture >= 80
    if one.kernel == "write_kernel":
        constants = cache_write.write_options(q, cache)
    elif one.kernel == "rotate_kernel":
        heads = torch.empty(1, one.group + 2, one.head_dim, dtype=one.dtype, device="meta")
        constants = rotate_and_write.rotate_options(heads, cache, 1e-6 if one.norms else None)
    elif one.kernel == "prefill_kernel":
        constants = paged_attention.prefill_options(*shape, fast)
    else:
        constants = paged_attention.decode_options(*shape, one.split, fast)
        if one.kernel == "merge_kernel":
            constants = paged_attention.merge_options(constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    data = "*" + DTYPES[one.dtype]
    types = {"k_ptr": data, "v_ptr": data, "q_ptr": data, "cache_ptr": data, "out_ptr": data, "slot_ptr": "*i64"}
    types |= dict.fromkeys(("heads_ptr", "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr"), data)
    types |= {"table_ptr": "*i32", "seq_len_ptr": "*i32", "query_start_ptr": "*i32"}
    types |= {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "num_splits": "i32"}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        # As at launch: addresses and strides are multiples of 16, but nothing is known about values that vary.
        varies = [name for names in paged_attention.VARYING.values() for name in names]
        if name not in constants and name not in varies:
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
    which: Annotated[str, typer.Argument(help="common or every.")] = "common",
    architecture: Annotated[int | None, typer.Argument(help="75, 80, 90 or 100 [default: all].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compile the Triton kernels, without a GPU, and print what they take of one."""
    if which not in ("common", "every"):
        raise typer.BadParameter(f"{which!r} is not one of: common, every")
    if architecture is not None and architecture not in ARCHITECTURES:
        raise typer.BadParameter(f"{architecture} is not one of: {', '.join(map(str, ARCHITECTURES))}")
    rows = []
    for target in ARCHITECTURES if architecture is None else (architecture,):
        for one in common() if which == "common" else every():
            if one.dtype == torch.bfloat16 and target < 80:
                continue  # there is none
            row = asdict(one) | {"dtype": DTYPES[one.dtype], "sm": target} | asdict(compile_ahead(one, target))
            rows.append(row)
    if as_json:
        print(json.dumps(rows))
        return
    columns = [name.replace("_", " ") for name in rows[0]]
    table = table_of("Registers and stack (bytes) of a thread, shared memory (bytes) of a program", columns)
    table.padding = 0  # there are many columns
    for row in rows:
        table.add_row(row.pop("kernel").removesuffix("_kernel"), *map(str, row.values()))
    show_table(table)


if __name__ == "__main__":
    app()
