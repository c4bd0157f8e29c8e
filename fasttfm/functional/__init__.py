"""Public functions: each chooses between a Triton kernel and plain PyTorch, and both compute what reference.py says."""
