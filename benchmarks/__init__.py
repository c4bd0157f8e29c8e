"""Timings of kernels, steps and decoding; each result is a JSON line with its machine, commit and command."""
