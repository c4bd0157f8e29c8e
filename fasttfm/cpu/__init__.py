"""The CPU backend: products in panels or by oneDNN, and passes between them that numba compiles.

The operators of fasttfm.functional take it where it is the faster way (a threshold's docstring says where that was
measured), and a search on a CPU runs a whole decoder step on it (decoder_step.py). It is optional: without numba
PyTorch computes the same.
"""
