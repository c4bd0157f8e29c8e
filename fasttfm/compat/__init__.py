"""Other packages' function signatures on our operators: change the import, keep the calls.

    from fasttfm.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
    from fasttfm.compat.varlen import varlen_attn

They also run on CPUs, take float32 as well as half precision, and have dropout. Unsupported arguments raise ValueError
and are never ignored.
"""
