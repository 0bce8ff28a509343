"""Prints into how many parts Inductor cuts a model of four layers at its attention, as JSON: with all layers in one
graph, and with each as a nested region, so that only one is compiled. Needs no GPU.

What worker/jit.py would need to compile a decoder whole: a compile time that does not grow with the number of layers,
and parts that can be captured, with attention between them.
"""

import json

import torch
import triton
from generated_code import Driver, an_h100
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


@torch.library.custom_op("example::attend", mutates_args=())
def attend(q: Tensor) -> Tensor:
    raise NotImplementedError


@attend.register_fake
def _(q: Tensor) -> Tensor:
    return torch.empty_like(q)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.ops.example.attend(x @ weight) @ weight


def num_parts(layer) -> int:
    def model(x, weights):
        for weight in weights:
            x = layer(x, weight)
        return x

    options = {"triton.cudagraphs": True, "graph_partition": True, "custom_should_partition_ops": ["example::attend"]}
    with an_h100(), torch.inference_mode(), FakeTensorMode():
        x, *weights = (torch.empty(64, 64, device="cuda") for _ in range(5))
        try:
            torch.compile(model, fullgraph=True, options=options)(x, weights)
        except Exception as error:
            return str(error).count("\ndef partition_")
    raise AssertionError("the code was not stopped")


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    print(json.dumps([num_parts(layer), num_parts(torch.compiler.nested_compile_region(layer))]))
