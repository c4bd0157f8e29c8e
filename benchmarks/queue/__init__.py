"""The device queue: prepared questions for a GPU that is available for minutes (run.py)."""
