"""Model directories and checkpoints. Re-exports nothing, because steps.py and ownership.py must not import torch."""
