"""Other packages' function signatures on our operators: change the import, keep the calls.

    from fasttfm.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
    from fasttfm.compat.varlen import varlen_attn

They run on CPUs too, take float32 beside half precision, and have dropout. What is not computed is refused with
ValueError by name, never ignored.
"""
