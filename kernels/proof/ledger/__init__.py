"""The ledger of the compile matrix: machine code counted by ptx_check (ptx-check/), recorded and compared here."""

try:
    import ptx_check
except ImportError as error:
    raise ImportError(
        "executing kernels and counting their machine code needs ptx_check, which is not installed: "
        "pip install ./fasttfm/ptx-check above the checkout (make install does it)"
    ) from error

from ptx_check.ledger.resources import Resources, occupancy

__all__ = ["Resources", "occupancy", "ptx_check"]
