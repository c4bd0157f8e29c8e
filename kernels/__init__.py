"""Triton kernels. Imports torch and triton alone; nothing here is imported before a kernel is first needed."""

import os

# Fused multiply-adds, as every kernel here is tested and budgeted with. Triton 3.9 warns that its default will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
