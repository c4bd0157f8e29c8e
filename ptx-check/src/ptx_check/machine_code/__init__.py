"""Machine code of sm_90 executed on a CPU: what an assembler made of PTX, held against the PTX itself.

operands.py says how operands are read and written, integers.py, floats.py, moves.py, memory.py, products.py,
barriers.py and control.py what instructions mean; run.py runs warps, launch.py a launch, cubin.py reads the file.
An instruction, or a word of its opcode, that these do not know is refused by name.
"""
