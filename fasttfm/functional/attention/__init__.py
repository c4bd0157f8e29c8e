"""Attention: what is asked (dense, packed, joint), and the routes that compute it."""
