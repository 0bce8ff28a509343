"""Quantizes a model into the formats of published checkpoints, by rounding to nearest, and measures what each costs.

    python -m benchmarks.formats --json formats.json

For each format: the size of the files, the memory of the weights, the perplexity of a text, and the speed of a decode.
Published checkpoints are rounded with more care (GPTQ, AWQ), so their perplexity is better. The tests of
quantization/layouts.py use the same writers.
"""

import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.checks import refuse
from benchmarks.machine import cpu_name, versions
from benchmarks.outputs import check_outputs
from benchmarks.peers.nanopage import greedy
from benchmarks.report import console, figure, show_table, table_of
from nanopage import LLM, SamplingParams
from nanopage.files.safetensors_checkpoint import safetensors_files
from nanopage.weights.hub import resolve

FP8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TEXT = Path(__file__).parent.parent / "docs"
WINDOW = 512  # tokens whose perplexity is measured together


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    fields = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return fields | {"config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"]}


def packed(bits: int, group_size: int | None = None, **others: Any) -> dict[str, Any]:
    strategy = "channel" if group_size is None else "group"
    others = {"symmetric": True} | others
    return compressed("pack-quantized", num_bits=bits, type="int", strategy=strategy, group_size=group_size, **others)


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False}
FLOAT8 = {"num_bits": 8, "type": "float"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCKS = [128, 128]
FORMS: dict[str, dict[str, Any]] = {
    "fp8, blocks": {"quant_method": "fp8", "weight_block_size": BLOCKS, "activation_scheme": "dynamic", "fmt": "e4m3"},
    "fp8, tensors": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "float, channels": compressed("float-quantized", **FLOAT8, strategy="channel"),
    "float, tensors": compressed("float-quantized", **FLOAT8, strategy="tensor"),
    "float, blocks": compressed("float-quantized", **FLOAT8, strategy="block", block_structure=BLOCKS),
    "int8": compressed("int-quantized", **INT8, symmetric=True),
    "int8, zero points": compressed("int-quantized", **INT8, symmetric=False),
    "int4, groups of 32": packed(4, 32, actorder="weight"),
    "int4, groups of 64, zero points": packed(4, 64, symmetric=False),
    "int4, channels": packed(4),
    "int4, act-order": packed(4, 32, actorder="group"),
    "int8, groups of 64": packed(8, 64),
    "int8, packed channels": packed(8),
    "nvfp4": compressed("nvfp4-pack-quantized", **NVFP4, symmetric=True),
    "nvfp4 of ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": FLOAT8},
    "fp8 of ModelOpt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
}


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]["weights"] if "config_groups" in config else {}


def quantize_fp8(weight: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """As `quantize`."""
    out, in_ = weight.shape
    block = config.get("weight_block_size") or weights_of(config).get("block_structure")
    one_scale = block is None and weights_of(config).get("strategy") != "channel"
    rows, columns = block or (out if one_scale else 1, in_)
    blocks = pad(weight, (0, -in_ % columns, 0, -out % rows)).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :in_]
    values = (weight / wide).to(FP8)
    exact, name = values.float() * wide, "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
    if one_scale:
        return {"weight": values, name: scale.reshape(()), "input_scale": torch.ones(1)}, exact
    return {"weight": values, name: scale}, exact


def quantize_integers(weight: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """As `quantize`."""
    weights, (out, in_) = weights_of(config), weight.shape
    bits, group = weights["num_bits"], weights.get("group_size") or in_
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    group_of = torch.arange(in_) // group
    if weights.get("actorder") == "group":
        group_of = group_of[torch.randperm(in_, generator=torch.Generator().manual_seed(in_))]
    columns = [weight[:, group_of == number] for number in range(in_ // group)]
    if weights["symmetric"]:
        scale = torch.stack([part.abs().amax(1) / high for part in columns], 1)
        zeros = torch.zeros_like(scale)
    else:
        ends = [(part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)) for part in columns]
        scale = torch.stack([(most - least) / (high - low) for least, most in ends], 1)
        zeros = (low - torch.stack([least for least, _ in ends], 1) / scale).round().clamp(low, high)
    scale = scale.to(torch.bfloat16)
    wide, wide_zeros = scale.float()[:, group_of], zeros[:, group_of]
    values = ((weight / wide).round() + wide_zeros).clamp(low, high)
    exact, values, zeros = (values - wide_zeros) * wide, values.to(torch.int8), zeros.to(torch.int8)
    if config["format"] == "int-quantized":
        tensors = {"weight": values, "weight_scale": scale}
        return tensors | ({} if weights["symmetric"] else {"weight_zero_point": zeros}), exact
    tensors = {"weight_packed": pack(values, bits), "weight_scale": scale, "weight_shape": torch.tensor([out, in_])}
    if not weights["symmetric"]:
        tensors["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
    if weights.get("actorder") == "group":
        tensors["weight_g_idx"] = group_of.int()
    return tensors, exact


def pack(values: Tensor, bits: int) -> Tensor:
    """compressed-tensors' pack_to_int32: numbers become unsigned, the first one in the lowest bits of a word."""
    per_word = 32 // bits
    numbers = values.long() + 2 ** (bits - 1)
    numbers = pad(numbers, (0, -numbers.shape[1] % per_word))
    words = torch.stack([numbers[:, i::per_word] << bits * i for i in range(per_word)]).sum(0)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def quantize_nvfp4(weight: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """As `quantize`."""
    groups = weight.unflatten(1, (-1, 16))
    common = 448 * 6 / weight.abs().max()
    scale = (groups.abs().amax(2) / 6 * common).to(FP8)
    wide = (scale.float() / common)[:, :, None]
    values = torch.where(wide > 0, groups / wide, 0).flatten(1)
    index = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    exact = ((E2M1[index] * values.sign()).unflatten(1, (-1, 16)) * wide).flatten(1)
    numbers = (index | (values < 0).long() << 3).to(torch.uint8)
    bytes_ = numbers[:, 0::2] | numbers[:, 1::2] << 4
    if config["quant_method"] == "modelopt":
        return {"weight": bytes_, "weight_scale": scale, "weight_scale_2": 1 / common, "input_scale": common}, exact
    return {"weight_packed": bytes_, "weight_scale": scale, "weight_global_scale": common[None]}, exact


def quantize(weight: Tensor, config: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Round a float32 matrix [out, in] to the nearest numbers of the format that a quantization_config describes.

    Returns: the tensors by the last parts of their names, and the weight that they define.
    """
    kind = config.get("quant_algo") or weights_of(config).get("type", "") + config.get("format", "FP8")
    if "nvfp4" in kind.lower():
        return quantize_nvfp4(weight, config)
    return (quantize_integers if kind.startswith("int") else quantize_fp8)(weight, config)


def write_quantized(source: Path, directory: Path, config: dict[str, Any]) -> None:
    """Quantize the linear layers of a model, except its head, and write it with its other files."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "nanopage.json"))
    tensors: dict[str, Tensor] = {}
    for file in safetensors_files(source):
        for name, tensor in load_file(file).items():
            if not name.endswith("_proj.weight"):
                tensors[name] = tensor
                continue
            parts, _ = quantize(tensor.float(), config)
            tensors |= {name.removesuffix("weight") + kind: part.contiguous() for kind, part in parts.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(fields, indent=2))


@contextmanager
def written(source: Path, name: str) -> Iterator[Path]:
    """The directory of the model in a format, while the block runs. Other names stand for the model itself."""
    with tempfile.TemporaryDirectory() as scratch:
        if name in FORMS:
            source, original = Path(scratch, "model"), source
            write_quantized(original, source, FORMS[name])
        yield source


def measure(
    path: Path, quantization: str | None, text: str, num_tokens: int, output_len: int, num_iters: int
) -> dict[str, float]:
    """Args: num_tokens: of the text. output_len: tokens of a decode."""
    llm = LLM(str(path), quantization=quantization, max_model_len=max(WINDOW + 1, output_len + 16))
    llm.engine.executor.compile()
    ids = llm.get_tokenizer().encode(text)[:num_tokens]
    windows = [ids[begin : begin + WINDOW] for begin in range(0, len(ids), WINDOW)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    losses = []
    for output in llm.generate([window for window in windows if len(window) > 1], params, use_tqdm=False):
        for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            losses.append(-found[token].logprob)
    speeds = []
    for _ in range(num_iters):
        (output,) = llm.generate([ids[:16]], greedy(output_len), use_tqdm=False)
        times = output.metrics.token_times
        speeds.append((len(times) - 1) / (times[-1] - times[0]))
    return {
        "disk_mb": sum(file.stat().st_size for file in safetensors_files(path)) / 1e6,
        "memory_mb": bytes_of(llm.engine.executor.worker.model) / 1e6,
        "perplexity": math.exp(statistics.mean(losses)),
        "decode_tok_s": statistics.median(speeds),
    }


def bytes_of(model: nn.Module) -> int:
    """The memory of weights. Packed for oneDNN, a weight may have tiles as well, which are in the same memory."""
    sizes: dict[int, int] = {}
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in [tensor for tensor in own if not tensor.is_mkldnn] or own:
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def main(
    model: Annotated[str | None, typer.Option(help="Directory or hub id [default: SmolLM2-135M].")] = None,
    formats: Annotated[str, typer.Option(help="Names of formats, separated by semicolons.")] = ";".join(FORMS),
    num_tokens: Annotated[int, typer.Option(min=WINDOW, help="Tokens of the text.")] = 16 * WINDOW,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of a decode.")] = 128,
    num_iters: Annotated[int, typer.Option(min=1, help="Decodes of each format.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    check_outputs({"--json": json_file})
    chosen = ["floats", "quantization=int8", "quantization=int4", *formats.split(";")]
    if unknown := [name for name in chosen[3:] if name not in FORMS]:
        refuse(f"{unknown[0]!r} is not one of {'; '.join(FORMS)}", "--formats")
    source = resolve(model)
    if not source.is_dir():
        refuse(f"{source} must be a directory of safetensors", "--model")
    text = "\n".join(file.read_text() for file in sorted(TEXT.glob("*.md")))
    results: dict[str, Any] = {"cpu": cpu_name(), "versions": versions(), "model": source.name, "formats": {}}
    for name in chosen:
        with console.status(name), written(source, name) as path:
            option = name.removeprefix("quantization=") if name.startswith("quantization=") else None
            results["formats"][name] = measure(path, option, text, num_tokens, output_len, num_iters)
        if json_file is not None:
            json_file.write_text(json.dumps(results, indent=1) + "\n")
    table = table_of(source.name, ["", "files MB", "weights MB", "perplexity", "of floats", "decode tok/s"])
    for name, found in results["formats"].items():
        ratio = found["perplexity"] / results["formats"]["floats"]["perplexity"]
        columns = (found["disk_mb"], found["memory_mb"], found["perplexity"], ratio, found["decode_tok_s"])
        table.add_row(name, *(f"{value:.3f}" if value is ratio else figure(value) for value in columns))
    show_table(table)


if __name__ == "__main__":
    typer.run(main)
