"""fasttfm: the encoder-decoder Transformer of "Attention Is All You Need" on fused Triton kernels.

Importing it queries no device and needs neither a GPU nor Triton.
"""

__version__ = "0.1.0"
