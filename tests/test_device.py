"""The memory that a process may take, by the files of a control group."""

import pytest
import torch

from nanopage import device


def write_group(directory, limit, current, **stat):
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{current}\n")
    (directory / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
    return directory


@pytest.mark.parametrize(
    ("limit", "current", "stat", "expected"),
    [
        (1000, 300, {}, (1000, 300)),
        (1000, 900, {"active_file": 200, "inactive_file": 500, "anon": 200}, (1000, 200)),
        (1000, 900, {"active_file": 600, "inactive_file": 500}, (1000, 0)),  # read at another moment
        ("max", 900, {}, (None, 0)),
    ],
)
def test_cached_pages_of_files_are_free(tmp_path, limit, current, stat, expected):
    assert device._container_limit(write_group(tmp_path, limit, current, **stat)) == expected


@pytest.mark.parametrize("content", ["", "lots\n", "a b c\n"])
def test_a_group_that_cannot_be_read_is_no_limit(tmp_path, content):
    assert device._container_limit(tmp_path / "missing") == (None, 0)
    for name in ("memory.max", "memory.current", "memory.stat"):
        write_group(tmp_path, 1000, 300)
        (tmp_path / name).write_text(content)
        limit, used = device._container_limit(tmp_path)
        assert (limit, used) == ((1000, 300) if (name, content) == ("memory.stat", "") else (None, 0))


def test_there_is_free_memory_and_no_more_than_there_is():
    assert 0 < device.free_bytes(torch.device("cpu")) <= device.total_ram()
