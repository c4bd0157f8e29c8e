"""Attention: what is asked (api.py), and the backends that compute it."""
