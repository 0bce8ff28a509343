"""Gives each test the file that it tests: exercises/NAME.py for test_NAME.py, or with --solutions solutions/NAME.py."""

import os
import sys
from pathlib import Path

import pytest

COURSE = Path(__file__).parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NANOPAGE_COMPILE", "never")
sys.path.insert(0, str(COURSE / "experiments"))  # the exercises use what is there
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: its kernels then run on the CPU


def pytest_addoption(parser):
    parser.addoption("--solutions", action="store_true", help="test the solutions instead of the exercises")
    parser.addoption("--both", action="store_true", help="test exercises and solutions")


def pytest_generate_tests(metafunc):
    if "exercise" in metafunc.fixturenames:
        folders = ["solutions"] if metafunc.config.getoption("--solutions") else ["exercises"]
        if metafunc.config.getoption("--both"):
            folders = ["exercises", "solutions"]
        metafunc.parametrize("exercise", folders, indirect=True, scope="module")


@pytest.fixture(scope="module")
def exercise(request):
    """The module that is tested."""
    folder, name = request.param, request.module.__name__.removeprefix("test_")
    import contest  # of experiments/

    return contest.load(folder, name)
