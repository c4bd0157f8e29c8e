"""A package of these kernels for Hugging Face's `kernels`: python -m fasttfm.hub --out DIR."""
