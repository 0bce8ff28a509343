"""Runs the C++ compiler for this processor, on the sources in this folder and on the code that Inductor generates."""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nanopage.cpu import tile_linear
from nanopage.cpu.compiled_files import digest

KERNELS = Path(tile_linear.__file__).parent
TILE_SOURCES = ("tile_linear.cpp", "tile_experts.cpp")
OPERATORS = "nanopage_operators"  # a static library of the operators that compiled code calls
SCRATCH = "scratch-"  # prefix of the names of temporary directories


def product_constants(dtype: torch.dtype) -> dict[str, int]:
    """The constants that the sources of products are compiled with."""
    return {"BFLOAT16": int(dtype == torch.bfloat16)}


def compile_library(constants: Mapping[str, int | str], sources: Sequence[Path], file: Path) -> None:
    """Compile sources to a shared library that uses torch, and move it to `file`, with a digest in its name."""
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=SCRATCH) as scratch:
        made = Path(scratch, file.name)
        run_compiler(constants, *sources, *shared(made))
        made.chmod(0o600)
        move(made, file)


def compile_operators(constants: Mapping[str, int | str], sources: Sequence[str], directory: Path) -> None:
    """Compile sources of this folder to a static library in `directory`."""
    objects = [directory / f"{source}.o" for source in sources]
    for source, made in zip(sources, objects, strict=True):
        run_compiler(constants, KERNELS / source, "-c", "-o", made)
    subprocess.run(["ar", "rcs", directory / f"lib{OPERATORS}.a", *objects], check=True)


def move(made: Path, file: Path) -> None:
    """Move a compiled file to `file`, with a digest in its name."""
    os.replace(made, file.with_name(f"{file.stem}.{digest(made)}.so"))  # atomic: never a partial file


def shared(file: Path) -> list[str]:
    """Arguments of the compiler for a shared library that uses torch."""
    return ["-shared", f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-o", str(file)]


def run_compiler(constants: Mapping[str, int | str], *arguments: str | Path) -> None:
    """Run the C++ compiler, for this processor. Raises: subprocess.CalledProcessError."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds to import

    command = [get_cpp_compiler(), "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC"]
    if only_avx2() and torch.cpu.get_capabilities().get("avx512_f"):  # act as a processor with AVX2 and nothing newer
        command += ["-march=x86-64-v3", "-mtune=native"]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    subprocess.run([*command, *map(str, arguments)], check=True)


def only_avx2() -> bool:
    """Whether torch uses AVX2 alone: because the processor has no AVX-512, or because of ATEN_CPU_CAPABILITY."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"
