"""Launches of a training step, as counted without a device and held on one."""

MOST_LAUNCHES = {"short": 361, "flash": 403, "softmax": 625}
"""Route of attention -> of six encoder and six decoder layers, in float32."""
