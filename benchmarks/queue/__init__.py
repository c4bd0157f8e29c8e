"""The device queue: prepared questions for a GPU that is at hand for minutes (run.py)."""
