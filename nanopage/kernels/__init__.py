"""The computations PyTorch has no single operator for: `reference.py` has them in plain torch, for every device, and
`ops.py` makes them operators that torch.compile can call."""
