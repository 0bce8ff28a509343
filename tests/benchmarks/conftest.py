import pytest

from benchmarks import compare, machine
from benchmarks.report import console


@pytest.fixture
def fast_and_wide(monkeypatch):
    """Do not measure the speed of memory and products (seconds each time), do not wait for threads, do not wrap."""
    for module in (machine, compare):
        monkeypatch.setattr(module, "read_bandwidth", lambda threads: 25.0)
    monkeypatch.setattr(compare, "product_speed", lambda threads, dtype, quantization: 250.0)
    monkeypatch.setattr(compare, "SETTLE", 0)
    monkeypatch.setattr(console, "width", 160)
