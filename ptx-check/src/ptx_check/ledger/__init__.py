"""Static instruction counts of compiled kernels: cycles that their loops need of each unit of a chip.

    from ptx_check.ledger.collect import compiled_for

    with compiled_for("sm_90") as found:        # or collected(), on a machine with a GPU
        my_kernel[(5,)](x, y, n, BLOCK=1024)
    found[0].counted.count.main.bound           # lower bound on the loop's time, in cycles of a scheduler

No GPU is needed. Chips have their compiler's names: sm_90, gfx942. The command is `ptx-check ledger`.
"""
