"""A CPU's fused run through a plain model: the encoder, and a step of the decoder."""
