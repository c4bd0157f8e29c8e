"""Import this module to let torch.compile capture operators under torch.func as single nodes.

It imports torch._dynamo, which importing fasttfm must not; torch.compile imports it when it traces such a call.
"""

import torch

from fasttfm.functional.derivative import transformed_calls

for function in transformed_calls:
    torch.compiler.allow_in_graph(function)
