"""Attention kernels: forward and backward for long rows, short rows in one program, the gradient of a mask."""
