"""Groups of cases that are timed."""

GROUPS = {
    "kernels": "benchmarks.cases.kernels",
    "blocks": "benchmarks.cases.blocks",
    "training_step": "benchmarks.cases.training_step",
    "decoding": "benchmarks.cases.decoding",
    "padding": "benchmarks.cases.padding",
}
"""Group -> the module whose cases(setting) lists its cases. A new group is a line here."""
