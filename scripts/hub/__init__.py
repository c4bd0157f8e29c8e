"""Builds a package of these kernels for Hugging Face's `kernels`: python -m scripts.hub --out DIR."""
