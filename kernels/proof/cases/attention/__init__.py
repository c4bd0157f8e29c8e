"""Compile cases of the kernels of attention/."""
