"""Executes machine code for sm_90 on a CPU, and compares it with the PTX that it was assembled from.

operands.py reads and writes operands; integers.py, floats.py, moves.py, memory.py, products.py, barriers.py and
control.py implement instructions; run.py runs warps, launch.py a launch; cubin.py parses cubins. Unknown instructions
and modifiers are rejected by name.
"""
