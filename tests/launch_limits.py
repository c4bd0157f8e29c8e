"""Launches of a training step, as counted without a device and held on one."""

MOST_LAUNCHES = {"short": 318, "flash": 355, "softmax": 553}
"""Route of attention -> of six encoder and six decoder layers, in float32."""
IN_HALF = 9
"""Launches more under bfloat16 autocast."""
