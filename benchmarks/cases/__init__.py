"""Groups of benchmark cases."""

GROUPS = {
    "kernels": "benchmarks.cases.kernels",
    "blocks": "benchmarks.cases.blocks",
    "training_step": "benchmarks.cases.training_step",
    "decoding": "benchmarks.cases.decoding",
    "padding": "benchmarks.cases.padding",
}
"""Group -> module with cases(setting). Add new groups here."""
