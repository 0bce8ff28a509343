"""Prints the kernels that Inductor generates for the pieces `between` and `last` on an H100, as JSON. Needs no GPU.

    python generated_code.py CONFIG=TOKENS...      directories with config.json, and numbers of tokens

Weights and inputs are fake tensors on a GPU that does not exist. Inductor is told its properties, and stopped when the
code is written: nothing is run.
"""

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from nanopage.models import find_family
from nanopage.models.decoder import Decoder
from nanopage.weights import loader
from nanopage.worker.jit import CompiledDecoder, any_length, without_patterns

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


class Driver:
    """What Inductor asks of Triton's driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class Written(Exception):
    """The code is complete."""


def stop(code: str) -> None:
    raise Written(code)


def an_h100() -> ExitStack:
    """A context in which Inductor believes that there is one."""
    stack = ExitStack()
    for owner, name, value in (
        (CudaInterface, "is_available", lambda: True),
        (CudaInterface, "current_device", lambda: 0),
        (CudaInterface, "is_bf16_supported", lambda including_emulation=False: True),
        (CudaInterface, "get_compute_capability", lambda device=None: 90),
        (CudaInterface, "get_device_properties", lambda device=None: H100),
        (CudaInterface.Worker, "get_device_properties", lambda device=None: H100),
        (GraphLowering, "save_output_code", stop),
    ):
        stack.enter_context(mock.patch.object(owner, name, staticmethod(value)))
    stack.enter_context(mock.patch("torch.cuda.get_device_properties", lambda device=None: H100))
    stack.enter_context(mock.patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)))
    for passes in (joint_graph, post_grad):  # patterns are registered by tracing on the GPU; none is needed here
        stack.enter_context(mock.patch.object(passes, "lazy_init", lambda *device: None))
    stack.enter_context(without_patterns())
    stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
    return stack


def kernels_of(piece, *arguments) -> list[str]:
    """The kernels that a compiled piece launches, in order."""
    try:
        piece(*arguments)
    except Exception as error:  # Dynamo wraps what the backend raises
        code = str(error)
        assert "def call(" in code, error
    return re.findall(r"(extern_kernels\.\w+|triton_\w+)(?:\.run)?\(", code.split("def call(")[1].split("\ndef ")[0])


def kernels_of_pieces(directory: Path, num_tokens: int) -> dict[str, list[str]]:
    config = loader.read_config(directory)
    with an_h100(), torch.inference_mode(), FakeTensorMode():

        def tensor(*shape):
            return any_length(torch.empty(shape, dtype=torch.bfloat16, device="cuda"))

        family = find_family(config.architecture)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            decoder = Decoder(config, [family.make_layer(config, index) for index in range(2)])
        decoder.requires_grad_(False)
        model = CompiledDecoder(decoder)
        x, attended = tensor(num_tokens, config.hidden_size), tensor(num_tokens, config.num_heads, config.head_dim)
        return {
            "between": kernels_of(model.betweens[0], model.layers[0], model.layers[1], x, attended),
            "last": kernels_of(model.last, model.layers[1], x, attended),
        }


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    pairs = (argument.rsplit("=", 1) for argument in sys.argv[1:])
    print(json.dumps([kernels_of_pieces(Path(config), int(count)) for config, count in pairs]))
