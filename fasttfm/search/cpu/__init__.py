"""A CPU's straight run through a plain model: the encoder, and a step of the decoder."""
