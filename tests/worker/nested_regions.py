"""Prints into how many parts Inductor cuts a model of four layers at its attention, as JSON: with all layers in one
graph, and with each as a nested region, so that only one is compiled. Needs no GPU.

What worker/jit.py would need to compile a decoder whole: a compile time that does not grow with the number of layers,
and parts that can be captured, with attention between them.
"""

import json
from contextlib import ExitStack
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering

from benchmarks.generated_code import Recorder, pretend


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
    recorder = Recorder(("model",))
    with ExitStack() as stack, torch.inference_mode():
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", staticmethod(recorder.listen)))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        pretend(stack)
        x, *weights = (torch.empty(64, 64, device="cuda:0") for _ in range(5))
        compiled = torch.compile(model, fullgraph=True, options=options)
        try:
            compiled(x, weights)
        except Exception:
            if not recorder.codes:
                raise
    return "".join(recorder.codes).count("\ndef partition_")


if __name__ == "__main__":
    print(json.dumps([num_parts(layer), num_parts(torch.compiler.nested_compile_region(layer))]))
