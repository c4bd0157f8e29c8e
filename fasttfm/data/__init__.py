"""Text to batches: SentencePiece, parallel corpora, the prepared directory, token-budget batches, the demo corpus.

Import from the modules: preparing data needs no torch, so that nothing is gathered here.
"""
