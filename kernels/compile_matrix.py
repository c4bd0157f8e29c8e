"""Compiles every kernel and tile for every chip, without a device, and holds the outcome against recorded budgets.

What is compiled is what the kernel files list: compile_case.py says how, philox.py shows it.

    python -m fasttfm.kernels.compile_matrix --report
"""
