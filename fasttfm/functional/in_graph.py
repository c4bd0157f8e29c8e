"""Importing this lets torch.compile take calls of operators under torch.func into its graphs as a whole.

It imports torch._dynamo, which importing fasttfm must not: torch.compile does the import where it comes to such a call.
"""

import torch

from fasttfm.functional.derivative import transformed_calls

for function in transformed_calls:
    torch.compiler.allow_in_graph(function)
