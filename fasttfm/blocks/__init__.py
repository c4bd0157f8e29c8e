"""Building blocks of every Transformer, written once: models compose them, nn gives them torch.nn's arguments.

Residual (x + Sublayer(LayerNorm(x)), or LayerNorm(x + Sublayer(x))), attention, feed-forward network, caches, packing,
embedding, loss, and merging, which spares launches without a layer taking notice.
"""
