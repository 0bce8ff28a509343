"""Mutated model files, made from a seed, and what nanopage does with each. test_attacks.py runs it as a process:

    python tests/attacks.py KIND:SEED ... < JSON: {KIND: [directory of a good model, ...], ...}

The process limits its own memory. For each case it prints a line of JSON before it begins and another with the outcome.
"""

import copy
import dataclasses
import json
import math
import os
import random
import resource
import shutil
import struct
import sys
from pathlib import Path

import gguf
import psutil
from nonsense import nonsense_encoder, nonsense_gguf

MEMORY = 2**30  # what a case may allocate beyond what the process has when it begins
NUMBERS = [0, 1, 2, -1, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
VALUES = [
    *(None, True, False, -1, 0, 1, 7, 0.5, 1e-300, 1e308, math.nan, math.inf, -math.inf, 2**31, 10**9, 10**30),
    *(-(10**30), "", "x", "x" * 5000, "\ud800", "\0", [], {}, [1], ["x"], {"content": 5}, {"a": {"b": []}}),
]
CONTROLS = "\x1b]0;title\x07\x9b2J\u202e"
TEXT = "The quick brown fox didn't jump over 12 lazy dogs: naïve café, 你好 🦊"


# Bytes


def mutate_bytes(rng: random.Random, data: bytes, interesting: int) -> bytes:
    """Change a few places, most of them in the first `interesting` bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        end = min(len(changed), interesting if rng.random() < 0.9 else len(changed))
        at = rng.randrange(end) if end else 0
        size = rng.choice([1, 4, 8, rng.randrange(1, 200)])
        match rng.randrange(7):
            case 0:
                changed[at : at + 1] = bytes([changed[at] ^ 1 << rng.randrange(8)]) if end else b""
            case 1:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                width = rng.choice([4, 8])
                changed[at : at + width] = (rng.choice(NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = rng.randbytes(size)
            case 5:
                del changed[at : at + size]
            case 6:
                changed[at:at] = changed[at : at + size]
    return bytes(changed)


# JSON


def mutate_json(rng: random.Random, value):
    """Change a value somewhere: its type, its size, its key, or whether it is there."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        match rng.randrange(10):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[rng.choice(["", "x", str(key).upper(), *value])] = value.pop(key)
            case 2:
                value[key] = [value[key]]
            case _:
                value[key] = mutate_json(rng, value[key])
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice([-value, value + 1, value * 1000, value / 2, value * 10**9, str(value), rng.choice(NUMBERS)])
    return copy.deepcopy(rng.choice(VALUES))


def json_bytes(rng: random.Random, data: dict) -> bytes:
    """A mutated object, sometimes with faults in the text as well."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        data = mutate_json(rng, data)
    text = json.dumps(data).encode("utf-8", "surrogatepass")
    match rng.randrange(12):
        case 0:
            return mutate_bytes(rng, text, len(text))
        case 1:
            return text.replace(b"{", b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b", ", 1)
        case 2 if isinstance(data, dict) and data:
            key = json.dumps(rng.choice(list(data))).encode()
            return text.replace(b"{", b"{" + key + b": " + json.dumps(rng.choice(VALUES)).encode() + b", ", 1)
        case 3:
            return text.decode().encode("utf-16")
    return text


# GGUF, field by field


def gguf_string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def gguf_field(rng: random.Random) -> bytes:
    """A type and a value of that type, out of nowhere."""
    number = rng.choice(NUMBERS)
    match rng.randrange(9):
        case 0:
            return struct.pack("<IQ", 10, number % 2**64)
        case 1:
            return struct.pack("<II", 4, number % 2**32)
        case 2:
            return struct.pack("<Ii", 5, -(number % 2**31))
        case 3:
            return struct.pack("<If", 6, rng.choice([0.0, -1.0, 1e-30, 3e38, math.nan, math.inf, 1.5]))
        case 4:
            return struct.pack("<IB", 7, rng.choice([0, 1, 2]))
        case 5:
            text = rng.choice([b"", b"llama", b"\xff", b"x" * 10_000, "é".encode()])
            return struct.pack("<I", 8) + gguf_string(text)
        case 6:
            count = rng.choice([0, 1, 3, 1000])
            return struct.pack("<IIQ", 9, 8, count) + gguf_string(rng.choice([b"", b"a", b"a b", b"\xc3"])) * count
        case 7:
            count = rng.choice([0, 1, 3, 1000])
            return struct.pack("<IIQ", 9, rng.choice([4, 5, 6]), count) + rng.randbytes(4) * count
        case _:
            depth = rng.choice([1, 2, 5000])
            return struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


def mutate_gguf(rng: random.Random, file: Path) -> bytes:
    """Replace, drop or repeat fields or entries of the table of tensors; or change bytes anywhere."""
    reader, data = gguf.GGUFReader(file), file.read_bytes()
    start = reader.data_offset
    if rng.random() < 0.4:
        return mutate_bytes(rng, data, start)
    fields = {}
    for key, field in list(reader.fields.items())[3:]:
        head = field.offset + 8 + len(key.encode())  # the value begins with its type
        fields[key] = data[head : field.offset + sum(part.nbytes for part in field.parts)]
    entries = []
    for tensor in reader.tensors:
        dims = [int(size) for size in tensor.shape]
        entries.append([tensor.name.encode(), dims, int(tensor.tensor_type), tensor.data_offset - start])
    extra: list[tuple[str, bytes]] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        key = rng.choice(list(fields)) if fields else "x"
        match rng.randrange(8):
            case 0:
                fields.pop(key, None)
            case 1:
                extra.append((key, fields.get(key) or gguf_field(rng)))
            case 2 | 3 | 4:
                fields[key] = gguf_field(rng)
            case 5:
                new = ["general.alignment", "split.count", "llama.rope.scaling.type", "tokenizer.ggml.eot_token_id"]
                fields[rng.choice(new)] = gguf_field(rng)
            case _:
                mutate_entry(rng, entries)
    pairs = [*fields.items(), *extra]
    counts = struct.pack("<IQQ", rng.choice([3] * 20 + [2, 1, 0x03000000]), len(entries), len(pairs))
    head = b"GGUF" + counts + b"".join(gguf_string(key.encode()) + value for key, value in pairs)
    for name, dims, kind, offset in entries:
        sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *(size % 2**64 for size in dims))
        head += gguf_string(name) + sizes + struct.pack("<IQ", kind % 2**32, offset % 2**64)
    return head + bytes(-len(head) % 32) + data[start:]


def mutate_entry(rng: random.Random, entries: list[list]) -> None:
    entry = rng.choice(entries) if entries else [b"x", [1], 0, 0]
    match rng.randrange(7):
        case 0:
            entries.append(list(entry))
        case 1 if entries:
            entries.remove(entry)
        case 2:
            entry[0] = rng.choice([b"", b"blk.9.attn_q.weight", b"rope_freqs.weight", b"\xff", entry[0] + b"x"])
        case 3:
            entry[1] = rng.choice([[], [0], [rng.choice(NUMBERS)], entry[1][::-1], [*entry[1], 1], [1] * 5])
        case 4:
            entry[1] = [rng.choice([size, size * 2, size // 2, *NUMBERS]) for size in entry[1]]
        case 5:
            entry[2] = rng.choice([*range(40), 2**31])
        case 6:
            entry[3] = rng.choice([0, 1, 32, entry[3] + 32, *NUMBERS])


# Strings


def string_places(value, owner=None, key=None) -> list[tuple]:
    """(the object or list that has it, its key) of each string in a JSON value, and (object, key, None) of each key."""
    if isinstance(value, str):
        return [(owner, key)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    keys = [(value, name, None) for name in value] if isinstance(value, dict) else []
    return keys + [place for name, inner in list(items) for place in string_places(inner, value, name)]


def mutate_string(rng: random.Random, value):
    """Make one string of a JSON value, which may be a key, one that a terminal obeys, that is no text, or that is very
    long."""
    by_owner: dict[int, list] = {}  # so that a vocabulary is not most of the choices
    for place in string_places(value):
        by_owner.setdefault(id(place[0]), []).append(place)
    owner, key, *is_key = rng.choice(rng.choice(list(by_owner.values())))
    text = rng.choice([CONTROLS, CONTROLS, "\ud800", CONTROLS + "x" * 10**5])
    if is_key:
        owner[rng.choice(["", key]) + text] = owner.pop(key)
    else:
        owner[key] = rng.choice(["", owner[key]]) + text
    return value


# Cases: a copy of a good model with a fault in it


def make_gguf(rng: random.Random, model: Path, target: Path, mutate=mutate_gguf) -> Path:
    (file,) = model.iterdir()
    target.mkdir()
    (target / "model.gguf").write_bytes(mutate(rng, file))
    return target / "model.gguf"


def make_gguf_values(rng: random.Random, model: Path, target: Path) -> Path:
    return make_gguf(rng, model, target, nonsense_gguf)


def make_safetensors(rng: random.Random, model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    names = sorted(path.name for path in target.glob("*.safetensors*"))
    file = target / rng.choice(names)
    data = file.read_bytes()
    if file.suffix == ".json":
        file.write_bytes(json_bytes(rng, json.loads(data)))
        return target
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        file.write_bytes(mutate_bytes(rng, data, 8 + size))
        return target
    header = json.loads(data[8 : 8 + size])
    text = json_bytes(rng, header)
    length = len(text) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
    file.write_bytes(length.to_bytes(8, "little") + text + data[8 + size :])
    return target


def make_json(rng: random.Random, model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    file = target / rng.choice(["config.json"] * 3 + ["tokenizer_config.json", "generation_config.json"])
    file.write_bytes(json_bytes(rng, json.loads(file.read_bytes())))
    return target


def make_tokenizer(rng: random.Random, model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    file = target / "tokenizer.json"
    data = json.loads(file.read_bytes())
    if rng.random() < 0.5:  # the rest of the file is the vocabulary
        part = rng.choice([key for key, value in data.items() if key != "model" and value])
        data[part] = mutate_json(rng, data[part])
        file.write_text(json.dumps(data), encoding="utf-8", errors="replace")
    else:
        file.write_bytes(json_bytes(rng, data))
    return target


def make_strings(rng: random.Random, model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    files = [path for path in sorted(target.rglob("*")) if path.suffix in (".json", ".safetensors")]
    file = rng.choice(files)
    data, size = file.read_bytes(), 0
    if file.suffix == ".safetensors":
        size = int.from_bytes(data[:8], "little")
    text = json.dumps(mutate_string(rng, json.loads(data[8 : 8 + size] if size else data))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] if size else text)
    return target


MAKERS = {
    "strings": make_strings,
    "encoder-strings": make_strings,
    "gguf": make_gguf,
    "safetensors": make_safetensors,
    "json": make_json,
    "tokenizer": make_tokenizer,
    "gguf-values": make_gguf_values,
    "encoder": nonsense_encoder,
}
NONSENSE = ("gguf-values", "encoder")  # which leave weights that fit and are finite: no request may fail


def attack(kind: str, path: Path) -> str:
    """Load a model and let it write two tokens, or make the vector of a text or a pair. Returns the outcome."""
    from nanopage import EngineConfig, PoolingParams, escaped
    from nanopage.build import build_engine

    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", enforce_eager=True,
        **({} if kind.startswith("encoder") else {"num_gpu_blocks_override": 64, "swap_space": 0}),
    )  # fmt: skip
    loaded = False
    try:
        engine = build_engine(config)
        loaded = True
        pooling = engine.model_config.pooling
        if pooling is None:
            params = dataclasses.replace(engine.default_sampling_params, max_tokens=2, seed=0)
            engine.add_request("a", TEXT, params)
        else:
            prompt = {"prompt": TEXT, "text_pair": TEXT} if pooling.scores else TEXT
            engine.submit(engine.input_processor.make_request("a", prompt, PoolingParams()))
        loaded = False
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        failed = outputs[-1].error
        if failed and kind in NONSENSE:
            return f"not clean: a request failed: {failed}"
        return "loaded, request failed" if failed else "loaded"
    except BaseException as error:
        if loaded and isinstance(error, ValueError):  # what is wrong with a prompt need not name a file
            return "loaded, prompt refused"
        name, message = type(error).__name__, str(error)
    allowed = ["ValueError", "FileNotFoundError", *([] if kind in NONSENSE else ["MemoryError"])]
    clean = name in allowed and str(path) in message and len(message) < 2000 and message == escaped(message)
    return name if clean else f"not clean: {name}: {message[:300]}"


def main(cases: list[str]) -> None:
    import torch

    import nanopage  # noqa: F401

    models = {kind: [Path(path) for path in paths] for kind, paths in json.load(sys.stdin).items()}
    torch.set_num_threads(1)
    scratch = Path.cwd() / f"case-{os.getpid()}"
    for kind, path in {path: (kind, path) for kind, paths in models.items() for path in paths}.values():
        outcome = attack(kind, next(path.glob("*.gguf"), path))  # also imports what is imported late
        assert outcome == "loaded", f"{path}: {outcome}"
    limit = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for case in cases:
        print(json.dumps({"case": case}), flush=True)
        kind, seed = case.split(":")
        rng = random.Random(case)
        path = MAKERS[kind](rng, models[kind][int(seed) % len(models[kind])], scratch)
        print(json.dumps({"case": case, "outcome": attack(kind, path)}), flush=True)
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main(sys.argv[1:])
