"""Proof without a GPU: every kernel compiled for every chip, its resources, budgets, costs and launches."""
