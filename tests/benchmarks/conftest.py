import pytest

from benchmarks import compare, machine
from benchmarks.report import console


@pytest.fixture
def fast_and_wide(monkeypatch):
    """Do not measure the memory's bandwidth (a second each time), do not wait between two runs, do not wrap lines."""
    for module in (machine, compare):
        monkeypatch.setattr(module, "read_bandwidth", lambda threads: 25.0)
    monkeypatch.setattr(compare, "SETTLE", 0)
    monkeypatch.setattr(console, "width", 160)
