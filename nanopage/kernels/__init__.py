"""The computations PyTorch has no single operator for: `cache_write.py` and `paged_attention.py` are Triton kernels for
a GPU, `reference.py` has attention in plain torch, for every device; `flash_decoding.py`, `tile_attention.py`,
`packed_linear.py` and `int8_linear.py` are loops for compiled code on a CPU."""
