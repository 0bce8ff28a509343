"""The computations PyTorch has no single operator for: `reference.py` has them in plain torch, for every device,
`flash_decoding.py` and `packed_linear.py` as loops for compiled code on a CPU, and `ops.py` makes operators of the
others."""
