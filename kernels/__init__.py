"""Triton kernels. Imports torch and triton alone; nothing here is imported before a kernel is first needed."""
