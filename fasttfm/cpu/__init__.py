"""CPU backend: matrix products from packed weights or by oneDNN, and fused loops between them, compiled by numba.

The operators of fasttfm.functional use it where it is faster (the docstring of each threshold says where that was
measured), and a search on a CPU runs a whole decoding step on it (search/cpu). numba is optional: without it PyTorch
computes the same.
"""
