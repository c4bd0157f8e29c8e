"""Timings of kernels, steps and decoding; every result is a JSON line that says where and how it was made."""
