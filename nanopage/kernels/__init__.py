"""The computations for which PyTorch has no single operator.

reference.py                          paged attention spelled out
grouped_attention.py, chunks.py       the same for many sequences at once, in plain PyTorch
cache_write.py, rotate_and_write.py, paged_attention.py, attention_kernels.py
                                      Triton kernels of attention, for a GPU
floors.py                             a Triton kernel of top-k, top-p and min-p
"""
