"""Limits of devices: by machine code; old chips."""
