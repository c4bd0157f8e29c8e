"""The model directory and the checkpoints in it. It gathers nothing: steps.py and ownership.py do without torch."""
