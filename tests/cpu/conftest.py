import os

import pytest
import torch

from nanopage.cpu import aot_products


@pytest.fixture(scope="session")
def products(tmp_path_factory, worker_id):
    """A cache with products of weights in tiles, which has begun under a umask that lets the user's group write. All
    processes of a test run share it, because each product takes seconds to compile."""
    base = tmp_path_factory.getbasetemp()
    directory = (base if worker_id == "master" else base.parent) / "products"
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        patch.delenv("NANOPAGE_COMPILE", raising=False)
        before = os.umask(0o002)
        try:
            assert all(aot_products.tile_product(dtype) for dtype in (torch.float32, torch.bfloat16))
        finally:
            os.umask(before)
    return directory
