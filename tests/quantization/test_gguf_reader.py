"""GGUF files written byte by byte: what is read, and that no file makes the reader allocate what it does not hold."""

import os
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantization
from gguf import GGUFEndian, GGUFValueType

from nanopage.quantization import gguf_reader
from nanopage.quantization.gguf_reader import read_header, read_rows

ARRAY, STRING, UINT8, UINT32, FLOAT32, BOOL = (
    GGUFValueType[name] for name in ("ARRAY", "STRING", "UINT8", "UINT32", "FLOAT32", "BOOL")
)
HUGE = [2**16, 2**32, 2**53, 2**63, 2**64 - 1]


def string(text: bytes | str, length: int | None = None) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def field(key: bytes | str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name="t", shape=(32, 2), kind=Quantization.F32, offset=0, num_dimensions=None) -> bytes:
    """`shape` as GGUF has it: the innermost dimension first."""
    count = len(shape) if num_dimensions is None else num_dimensions
    sizes = struct.pack(f"<I{len(shape)}Q", count, *shape)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def contents(fields=(), tensors=(), data=b"", version=3, num_fields=None, num_tensors=None, magic=b"GGUF") -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(fields) if num_fields is None else num_fields)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def read(path, data: bytes):
    path.write_bytes(data)
    return read_header(path)


def refuse(path, match: str, data: bytes | None = None, most: int = 2**20) -> None:
    """Reading fails, names the file, and takes at most `most` bytes of memory."""
    if data is not None:
        path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


# What is read


def write_everything(path, **options) -> gguf.GGUFWriter:
    """A file with every type of field, and tensors."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"uint{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"int{bits}", -(2 ** (bits - 1)))
    writer.add_float32("float32", 1e-5)
    writer.add_float64("float64", 1e-300)
    writer.add_bool("true", True)
    writer.add_bool("false", False)
    writer.add_string("string", "Ünïcode 🦊")
    writer.add_key_value("empty", "", STRING)
    writer.add_array("strings", ["a", "", "ß", "x" * 1000])
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False, True])
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("matrix", np.arange(12, dtype=np.float16).reshape(3, 4))
    writer.add_tensor("cube", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    blocks = gguf.quantize(np.linspace(-1, 1, 192, dtype=np.float32).reshape(3, 64), Quantization.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=Quantization.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer


@pytest.mark.parametrize("alignment", [None, 64, 256])
def test_a_file_is_read_as_by_the_gguf_package(path, alignment, monkeypatch):
    if alignment:
        add_header = gguf.GGUFWriter.__init__
        monkeypatch.setattr(
            gguf.GGUFWriter,
            "__init__",
            lambda self, *args, **options: (add_header(self, *args, **options), self.add_custom_alignment(alignment))[
                0
            ],
        )
    write_everything(path)
    header, reader = read_header(path), gguf.GGUFReader(path)
    theirs = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.fields.keys() == theirs.keys()
    for key, value in header.fields.items():
        if isinstance(value, np.ndarray):
            assert value.tolist() == theirs[key], key
        else:
            assert (value, type(value)) == (theirs[key], type(theirs[key])), key
    assert list(header.tensors) == [entry.name for entry in reader.tensors]
    for entry in reader.tensors:
        ours = header.tensors[entry.name]
        assert (ours.kind, ours.offset, ours.num_bytes) == (entry.tensor_type, entry.data_offset, entry.n_bytes)
        assert ours.shape == tuple(int(size) for size in entry.shape)[::-1]
        data = entry.data.view(np.uint8).reshape(-1)
        num_rows = int(np.prod(ours.shape[:-1]))
        assert (read_rows(path, ours, 0, num_rows, header.state).reshape(-1) == data).all()
        if num_rows > 1:
            assert (read_rows(path, ours, 1, num_rows, header.state).reshape(-1) == data[len(data) // num_rows :]).all()


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(path, version):
    header = read(path, contents([field("n", UINT32, b"\7\0\0\0")], [tensor()], bytes(256), version))
    assert header.fields == {"n": 7}
    assert header.tensors["t"].shape == (2, 32)


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_file_of_the_format_is_read(path, count):
    header = read(path, contents([field("a", ARRAY, array(STRING, 0))] * count))
    assert header.tensors == {}
    assert header.fields == ({"a": []} if count else {})


def test_the_end_of_the_data_needs_no_padding_and_may_have_more(path):
    for extra in (0, 1, 100):
        header = read(path, contents([], [tensor(shape=(3,))], bytes(12 + extra)))
        assert header.tensors["t"].num_bytes == 12


# What is refused


@pytest.mark.parametrize("version", [0, 1, 4, 99, 2**16 - 1])
def test_another_version_is_refused(path, version):
    refuse(path, rf"its version is {version}; supported: 2 and 3", contents(version=version))


def test_a_big_endian_file_is_refused_as_such(path):
    write_everything(path, endianess=GGUFEndian.BIG)
    refuse(path, "it is big-endian: gguf-convert-endian makes it little")


@pytest.mark.parametrize("data", [b"", b"G", b"GGU"])
def test_less_than_the_magic_is_truncated(path, data):
    refuse(path, "truncated", data)


@pytest.mark.parametrize("magic", [b"GGML", b"FUGG", bytes(4), b"\x80\x02}q"])
def test_another_magic_is_shown(path, magic):
    refuse(path, "it begins with", contents(magic=magic))


def test_every_cut_is_an_error(path):
    write_everything(path)
    data = path.read_bytes()
    end = max(entry.offset + entry.num_bytes for entry in read_header(path).tensors.values())
    for size in range(0, end, 7):
        refuse(path, "truncated", data[:size])


@pytest.mark.parametrize("count", HUGE)
class TestCountsThatTheFileDoesNotHold:
    def test_of_fields(self, path, count):
        refuse(path, "is too short for|has [0-9,]+ fields", contents(num_fields=count))

    def test_of_tensors(self, path, count):
        refuse(path, "is too short for|has [0-9,]+ tensors", contents(num_tensors=count))

    def test_of_bytes_in_a_key(self, path, count):
        refuse(path, "ends within the key of field 0", contents([string("k", count)]))

    def test_of_bytes_in_a_string(self, path, count):
        refuse(path, "ends within field 'k'", contents([field("k", STRING, string("v", count))]))

    def test_of_bytes_in_a_tensor_name(self, path, count):
        refuse(path, "ends within the table of tensors", contents([], [string("t", count) + bytes(40)]))

    @pytest.mark.parametrize("kind", [kind for kind in GGUFValueType if kind != ARRAY])
    def test_of_values_in_an_array(self, path, count, kind):
        refuse(path, "field 'k'", contents([field("k", ARRAY, array(kind, count, bytes(64)))]))

    def test_of_bytes_in_a_string_of_an_array(self, path, count):
        values = string("a") + string("b", count)
        refuse(path, "ends within field 'k'", contents([field("k", ARRAY, array(STRING, 2, values))]))

    @pytest.mark.parametrize("at", [0, 1])
    def test_of_values_in_a_dimension(self, path, count, at):
        shape = (count // 32 * 32, 1) if at == 0 else (32, count)
        refuse(
            path, r"tensor 't' of [0-9,]+ bytes ends beyond the file", contents([], [tensor(shape=shape)], bytes(256))
        )


@pytest.mark.parametrize("depth", [1, 2, 40_000])
def test_arrays_of_arrays_are_refused_at_once(path, depth):
    nested = b"".join(array(ARRAY, 1) for _ in range(depth)) + array(UINT8, 0)
    refuse(
        path,
        "field 'tokenizer.ggml.tokens' is an array of arrays",
        contents([field("tokenizer.ggml.tokens", ARRAY, nested)]),
    )


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("a string", string(b"", 2**33)),
        ("numbers", array(UINT8, 2**33)),
        ("floats", array(FLOAT32, 2**31)),
        ("strings", array(STRING, 2**29)),
        ("one string", array(STRING, 1, string(b"", 2**33))),
    ],
)
def test_metadata_larger_than_the_limit_is_not_read_even_if_the_file_holds_it(path, what, value):
    kind = STRING if what == "a string" else ARRAY
    path.write_bytes(contents([field("k", kind, value)]))
    os.truncate(path, 2**34)  # all holes: takes no room on the disk
    refuse(path, "ends beyond 128 MiB|has [0-9,]+ strings")


def test_many_small_strings_take_memory_in_proportion_to_the_limit(path, monkeypatch):
    monkeypatch.setattr(gguf_reader, "MAX_METADATA", 2**20)
    path.write_bytes(contents([field("k", ARRAY, array(STRING, 2**20))]))
    os.truncate(path, 2**30)
    refuse(path, "ends beyond", most=2**23)


@pytest.mark.parametrize("name", ["MAX_FIELDS", "MAX_TENSORS"])
def test_fields_and_tensors_are_counted(path, monkeypatch, name):
    monkeypatch.setattr(gguf_reader, name, 3)
    fields = [field(f"k{i}", UINT32, bytes(4)) for i in range(4)]
    tensors = [tensor(f"t{i}", (8,), offset=32 * i) for i in range(4)]
    read(path, contents(fields[:3], tensors[:3], bytes(128)))
    many = contents(fields, [], b"") if name == "MAX_FIELDS" else contents([], tensors, bytes(128))
    refuse(path, "it has 4 (fields|tensors), more than 3", many)


@pytest.mark.parametrize("kind", [13, 99, 2**32 - 1])
def test_unknown_types_are_named(path, kind):
    refuse(path, f"field 'k' is of the unknown type {kind}", contents([field("k", kind, bytes(64))]))
    refuse(path, f"field 'k' is of the unknown type {kind}", contents([field("k", ARRAY, array(kind, 1, bytes(64)))]))


@pytest.mark.parametrize("kind", [4, 5, 99, 2**32 - 1])  # 4 and 5 were types once
def test_an_unknown_type_of_a_tensor_is_named(path, kind):
    refuse(path, f"tensor 't' is of the unknown type {kind}", contents([], [tensor(kind=kind)], bytes(4096)))


def test_keys_and_tensors_occur_once(path):
    twice = [field("k", UINT32, bytes(4)), field("j", UINT32, bytes(4)), field("k", BOOL, bytes(1))]
    refuse(path, "field 'k' occurs twice", contents(twice))
    refuse(path, "tensor 't' occurs twice", contents([], [tensor(), tensor("u"), tensor(offset=512)], bytes(1024)))


@pytest.mark.parametrize("value", [2, 255])
def test_a_bool_is_0_or_1(path, value):
    refuse(path, f"field 'k' is a bool of value {value}", contents([field("k", BOOL, bytes([value]))]))
    refuse(path, f"a bool of value {value}", contents([field("k", ARRAY, array(BOOL, 3, bytes([0, value, 1])))]))


def test_text_is_utf_8(path):
    refuse(path, "the key of field 0 is not valid UTF-8", contents([field(b"\xff", UINT32, bytes(4))]))
    refuse(path, "field 'k' is not valid UTF-8", contents([field("k", STRING, string(b"a\xc3"))]))
    refuse(path, "field 'k' is not valid UTF-8", contents([field("k", ARRAY, array(STRING, 1, string(b"\x80")))]))
    refuse(path, "table of tensors is not valid UTF-8", contents([], [tensor(b"\xff")], bytes(256)))


@pytest.mark.parametrize("count", [0, 5, 2**31, 2**32 - 1])
def test_a_tensor_has_one_to_four_dimensions(path, count):
    refuse(path, f"tensor 't' has {count} dimensions", contents([], [tensor(num_dimensions=count)], bytes(256)))


@pytest.mark.parametrize("shape", [(0,), (32, 0), (0, 32)])
def test_a_dimension_is_not_zero(path, shape):
    refuse(path, "tensor 't' has the shape", contents([], [tensor(shape=shape)], bytes(256)))


@pytest.mark.parametrize(("kind", "row"), [(Quantization.Q8_0, 33), (Quantization.Q4_K, 128), (Quantization.Q4_0, 1)])
def test_a_row_has_whole_blocks(path, kind, row):
    refuse(
        path,
        f"rows of {row}, not a multiple of {kind.name}'s",
        contents([], [tensor(shape=(row, 2), kind=kind)], bytes(999)),
    )


@pytest.mark.parametrize("offset", [1, 4, 31, 33, 2**63 + 1])
def test_a_tensor_is_aligned(path, offset):
    refuse(path, f"tensor 't' begins at {offset}, not a multiple", contents([], [tensor(offset=offset)], bytes(999)))


@pytest.mark.parametrize("offset", [32, 256, 2**40, 2**64 - 32])
def test_a_tensor_lies_in_the_file(path, offset):
    refuse(path, r"tensor 't' of 256 bytes ends beyond the file", contents([], [tensor(offset=offset)], bytes(256)))


@pytest.mark.parametrize("offset", [0, 32, 224])
def test_tensors_do_not_overlap(path, offset):
    tensors = [tensor("a"), tensor("b", offset=offset)]
    refuse(path, "the tensors '[ab]' and '[ab]' overlap", contents([], tensors, bytes(1024)))
    tensors = [tensor("a"), tensor("b", offset=256)]
    assert len(read(path, contents([], tensors, bytes(512))).tensors) == 2


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (UINT32, struct.pack("<I", 0)),
        (UINT32, struct.pack("<I", 33)),
        (FLOAT32, struct.pack("<f", 32)),
        (BOOL, b"\1"),
        (STRING, string("32")),
        (ARRAY, array(UINT32, 1, struct.pack("<I", 32))),
    ],
)
def test_the_alignment_is_a_power_of_two(path, kind, value):
    refuse(path, "general.alignment must be a power of two", contents([field("general.alignment", kind, value)]))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "FIFO"])
def test_what_is_no_file_is_refused(path, make):
    make(path)
    refuse(path, "is not a regular file")


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose reading fails")
def test_a_file_that_cannot_be_read_is_named(path):
    path.symlink_to("/proc/self/mem")
    refuse(path, "truncated|cannot be read")


def test_a_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError, match=str(path)):
        read_header(path)


@pytest.mark.parametrize("change", ["cut", "written", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_read_is_an_error(path, change):
    header = read(path, contents([], [tensor()], bytes(256)))
    assert read_rows(path, header.tensors["t"], 0, 1, header.state).nbytes == 128
    data = path.read_bytes()
    if change in ("cut", "removed"):
        os.truncate(path, path.stat().st_size - 1)
    elif change == "written":
        path.write_bytes(data)
        os.utime(path, (1, 1))
    if change in ("replaced", "removed"):
        path.rename(path.with_suffix(".old"))
    if change == "replaced":
        path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read" if change == "removed" else "has changed.* at tensor 't'"):
        read_rows(path, header.tensors["t"], 1, 2, header.state)
