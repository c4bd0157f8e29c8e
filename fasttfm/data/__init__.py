"""Text to batches: SentencePiece, parallel corpora, the prepared directory, token-budget batches, the demo corpus.

Import from the submodules: this package re-exports nothing, because preparing data must not import torch.
"""
