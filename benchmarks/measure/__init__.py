"""How it is timed and checked, and what a record says."""
