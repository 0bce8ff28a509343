"""The computations for which PyTorch has no single operator.

pages.py                              the layout of the KV cache
reference.py, chunks.py               paged attention in plain PyTorch, for every device
cache_write.py, rotate_and_write.py, paged_attention.py, attention_kernels.py
                                      Triton kernels of attention, for a GPU
floors.py                             a Triton kernel of top-k, top-p and min-p
cpu/                                  loops that are compiled for a CPU
"""
