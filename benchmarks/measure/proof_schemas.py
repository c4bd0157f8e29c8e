"""Schemas of the records of proof: PTX that was executed, and what a version of Triton compiles."""

from __future__ import annotations

from benchmarks.measure.schema_parts import AT_LEAST_ONE, COUNT, MACHINE, MACHINE_FIELDS, POSITIVE, TEXT, fields

EXECUTED = fields(
    {
        "benchmark": {"const": "executed"},
        "chip": TEXT,
        "cases": AT_LEAST_ONE,
        "passed": COUNT,
        "failed": {"type": "array", "items": TEXT},
        "mutations": {
            "type": "array",
            "items": fields(
                {
                    "subject": TEXT,
                    "chip": TEXT,
                    "dtype": TEXT,
                    "noticed": COUNT,
                    "missed": COUNT,
                    "equivalent": COUNT,
                    "unreached": COUNT,
                }
            ),
        },
        "seconds": POSITIVE,
        "workers": AT_LEAST_ONE,
        "machine": MACHINE,
    }
)
"""Cases of kernels whose PTX was executed on a CPU, written by `python -m benchmarks.executed`, a line a chip.

Of mutations of a subject's PTX: noticed or missed; equivalent, which provably change nothing that is stored; unreached,
which make no difference to any thread with these inputs."""

COMPILE_MATRIX = fields(
    {
        "benchmark": {"const": "compile_matrix"},
        "command": TEXT,
        "date": MACHINE_FIELDS["time"],
        "commit": MACHINE_FIELDS["commit"],
        "triton": TEXT,
        "chips": {"type": "array", "items": TEXT, "minItems": 1},
        "cases": AT_LEAST_ONE,
        "compiled": COUNT,
        "broken": {
            "type": "array",
            "items": fields({"chip": TEXT, "case": TEXT, "dtype": TEXT, "complaint": TEXT}),
        },
    }
)
"""What a version of Triton compiles, written by `python -m fasttfm.kernels.proof.matrix --record FILE`."""
