"""Fused CPU passes through a plain model: the encoder, and a decoder step."""
