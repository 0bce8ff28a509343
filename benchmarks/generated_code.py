"""Shows what Inductor generates for the pieces of a decoder on a GPU (worker/jit.py). Prints a list of pieces as JSON.

    python -m benchmarks.generated_code REQUESTS      a list of objects with the fields of Request, as JSON

Without a GPU, weights and inputs are fake tensors on an H100 that does not exist. Inductor is told the properties of an
H100, and is stopped when the code is written: Triton compiles nothing, and nothing is run.
"""

import ctypes
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from nanopage.device import resolve_dtype, set_cuda_precision
from nanopage.experts import grouped_linear
from nanopage.experts.moe import group_experts
from nanopage.models import find_family
from nanopage.models.decoder import Decoder
from nanopage.quantization import quantized_linear
from nanopage.quantization.quantized import quantize
from nanopage.state.sampling_table import SamplingTable
from nanopage.weights import allocation, loader
from nanopage.worker import jit
from nanopage.worker.cuda_graphs import make_sample_all

GPU = torch.device("cuda", 0)  # without the index, torch would ask the driver for it
H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    total_memory=80 * 2**30,
)
# The calls that launch kernels: products of cuBLAS, operators that Inductor does not look into, Triton kernels.
LAUNCH = re.compile(r"(extern_kernels\.\w+|torch\.ops\.\w+\.\w+)(?:\.\w+)?\(|(\w+)\.run\(")
# nanopage's operators: the module, its kernel, and what launches it
OPERATORS: dict[str, tuple[Any, str, Callable]] = {
    "quantized_linear": (quantized_linear, "linear_kernel", quantized_linear.product),
    "grouped_experts": (grouped_linear, "grouped_linear_kernel", grouped_linear.grouped_experts),
}


@dataclass(frozen=True)
class Request:
    """Which pieces to compile, of the first `num_layers` layers (None: all) of the model in a directory."""

    model: str
    dtype: str = "auto"
    quantization: str | None = None
    num_layers: int | None = None
    pieces: tuple[str, ...] = ("first", "between", "last", "head", "sampler")


@dataclass
class Piece:
    """The code generated for a piece, for steps of several tokens or of a single token.

    seconds   until the code was written; on a GPU, until it was also compiled and had run once
    size      bytes of the code
    launches  the names of the kernels and operators that the code launches, in order
    inside    how many kernels nanopage's operators in `launches` launch
    """

    piece: str
    tokens: int
    seconds: float
    size: int
    launches: list[str]
    inside: int


class Driver:
    """The part of Triton's driver that Inductor needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class Written(Exception):
    """The code is complete."""


def pretend(stack: ExitStack) -> None:
    """Make torch and Inductor believe that there is an H100, until the stack is closed."""
    for owner, name, value in (
        (CudaInterface, "is_available", lambda: True),
        (CudaInterface, "current_device", lambda: 0),
        (CudaInterface, "is_bf16_supported", lambda including_emulation=False: True),
        (CudaInterface, "get_compute_capability", lambda device=None: 90),
        (CudaInterface, "get_device_properties", lambda device=None: H100),
        (CudaInterface.Worker, "get_device_properties", lambda device=None: H100),
        (torch.cuda, "get_device_properties", lambda device=None: H100),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "mem_get_info", lambda device=None: (2**50, 2**50)),  # fake tensors take no memory
        (torch.cuda, "synchronize", lambda device=None: None),
    ):
        stack.enter_context(mock.patch.object(owner, name, staticmethod(value)))
    for passes in (joint_graph, post_grad):  # patterns are registered by tracing on the GPU; none is needed here
        stack.enter_context(mock.patch.object(passes, "lazy_init", lambda *device: None))
    # Folding constants would compute them on the GPU.
    stack.enter_context(torch._inductor.config.patch(joint_graph_constant_folding=False))
    triton.runtime.driver.set_active(Driver())
    # Indexing a tensor needs its device's guard, which a CPU build of torch lacks. The guard of meta does nothing.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[1] or guards[14]  # by c10::DeviceType
    stack.enter_context(FakeTensorMode())


class Inside(TorchDispatchMode):
    """Counts the kernels that nanopage's operators launch: Triton's, which do not run here, and torch's. An operator of
    torch counts as one kernel; those that sort launch several."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.of_torch, self.is_inside = mock.MagicMock(), 0, False

    @property
    def count(self) -> int:
        return self.of_torch + self.kernel.__getitem__.call_count

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name, options = function.__name__.partition(".")[0], options or {}
        if name in OPERATORS:
            module, kernel, compute = OPERATORS[name]
            self.is_inside = True
            with self, mock.patch.object(module, kernel, self.kernel):
                result = compute(*arguments)
            self.is_inside = False
            return result
        if self.is_inside and function.namespace == "aten":
            with self:  # count the operators that it is made of
                result = function.decompose(*arguments, **options)
            if result is not NotImplemented:
                return result
            self.of_torch += not (function.is_view or "empty" in name)
        return function(*arguments, **options)


class Recorder:
    """Compiles pieces, and keeps what Inductor generates for them."""

    def __init__(self, wanted: tuple[str, ...]):
        self.wanted, self.real = wanted, torch.cuda.is_available()
        self.codes: list[str] = []
        self.pieces: list[Piece] = []

    def listen(self, code: str) -> None:
        """Called by Inductor."""
        self.codes.append(code)
        if not self.real:
            raise Written

    def wrap(self, name: str, compiled: Callable, index: int = -1) -> Callable:
        """A function whose call compiles a piece, if it is wanted. index: of an argument with one row per token."""

        def call(*arguments: Any) -> None:
            self.codes, started = [], time.perf_counter()
            try:
                compiled(*arguments)
                torch.cuda.synchronize()
            except Exception:  # Dynamo wraps what the backend raises
                if not self.codes:
                    raise
            seconds, code = time.perf_counter() - started, "".join(self.codes)
            body = code.split("def call(")[1].split("\ndef ")[0]
            launches = ["".join(groups) for groups in LAUNCH.findall(body)]
            with Inside() as inside:
                if name != "sampler":  # which has no such operators
                    getattr(jit, name.replace("last", "between"))(*arguments)
            tokens = len(arguments[index])
            self.pieces.append(Piece(name, tokens, seconds, len(code.encode()), launches, inside.count))

        return call if name in self.wanted else lambda *arguments: None


def compile_pieces(request: Request) -> list[Piece]:
    """Compile pieces as the engine does, of a model and options that it takes."""
    path, recorder = Path(request.model), Recorder(request.pieces)
    config = loader.read_config(path)
    family: Any = find_family(config.architecture)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", staticmethod(recorder.listen)))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        if not recorder.real:
            pretend(stack)
        dtype, _ = resolve_dtype(request.dtype, config.dtype, GPU)
        with torch.device("meta"):
            layers = range(request.num_layers or config.num_layers)
            decoder = Decoder(config, [family.make_layer(config, index) for index in layers])
        group_experts(decoder)
        allocation.materialize(decoder, dtype, GPU, for_use=False)
        if request.quantization is not None:
            quantize(decoder, request.quantization, GPU)
        model = jit.CompiledDecoder(decoder)
        for name in ("first", "head"):
            setattr(model, name, recorder.wrap(name, getattr(model, name)))
        all_layers: Any = model.layers
        names = {layer.piece: "between" if layer.following else "last" for layer in all_layers}
        wrapped = {piece: recorder.wrap(name, piece) for piece, name in names.items()}
        for layer in all_layers:
            layer.piece = wrapped[layer.piece]
        jit.warm_up(model, config, dtype, GPU)
        sample_all = make_sample_all(lambda function: recorder.wrap("sampler", jit.compile_afresh(function), 1))
        jit.warm_up_sampling(sample_all, SamplingTable(9, config.vocab_size, GPU), dtype, GPU)
    return recorder.pieces


if __name__ == "__main__":
    set_cuda_precision()
    print(json.dumps([[asdict(piece) for piece in compile_pieces(Request(**one))] for one in json.loads(sys.argv[1])]))
