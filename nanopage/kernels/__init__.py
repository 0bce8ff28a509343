"""The computations PyTorch has no single operator for: `reference.py` has attention in plain torch, for every device;
`flash_decoding.py`, `tile_attention.py` and `packed_linear.py` are loops for compiled code on a CPU."""
