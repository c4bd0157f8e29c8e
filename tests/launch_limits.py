"""Launches of a training step, as counted without a device and held on one."""

MOST_LAUNCHES = {"short": 330, "flash": 367, "softmax": 565}
"""Route of attention -> of six encoder and six decoder layers, in float32."""
