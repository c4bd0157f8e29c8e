"""The ledger of machine code: what kernels' loops ask of a chip's units, counted without a device.

    from ptx_check.ledger.collect import compiled_for

    with compiled_for("sm_90") as found:        # or collected(), beside a device
        my_kernel[(5,)](x, y, n, BLOCK=1024)
    found[0].counted.count.main.bound           # cycles of a scheduler below which the loop cannot be

A chip is named as its compiler names it: sm_90, gfx942. `ptx-check ledger` is its command.
"""
