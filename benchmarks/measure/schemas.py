"""JSON Schemas of the records: what a line of benchmarks/results says.

python -c "import json, benchmarks.measure.schemas as s; print(json.dumps(s.SCHEMAS, indent=2))"
"""

from __future__ import annotations

from typing import Any

from benchmarks.measure.schema_parts import (
    AT_LEAST_ONE,
    COUNT,
    CURVE,
    MACHINE,
    MACHINE_FIELDS,
    MAYBE,
    OBJECTS,
    POSITIVE,
    RATE,
    ROWS,
    RUNS,
    SCALAR,
    TEXT,
    TEXTS,
    fields,
    or_null,
)

GROUPS = ("kernels", "blocks", "training_step", "decoding", "padding", "end_to_end")
STATUSES = ("timed", "refused", "absent", "wrong")

BENCHMARK = fields(
    {
        "schema": {"const": 1},
        "group": {"enum": list(GROUPS)},
        "case": TEXT,
        "shape": {"type": "object", "additionalProperties": SCALAR},
        "dtype": {"enum": ["float32", "float16", "bfloat16"]},
        "pass": TEXT,
        "provider": TEXT,
        "status": {"enum": list(STATUSES)},
        "reason": {"type": ["string", "null"]},
        "clock": TEXT,
        "time_us": or_null(fields({"p20": POSITIVE, "p50": POSITIVE, "p80": POSITIVE, "runs": AT_LEAST_ONE})),
        "throughput": or_null(fields({"value": RATE, "unit": TEXT})),
        "tflop_per_s": MAYBE,
        "gb_per_s": MAYBE,
        "roofline": or_null(
            fields(
                {
                    "floor_us": RATE,
                    "share": RATE,
                    "ceilings": fields({"gb_per_s": POSITIVE, "tflop_per_s": POSITIVE}),
                }
            )
        ),
        "peak_bytes": {"type": ["integer", "null"], "minimum": 0},
        "launches": {"type": ["integer", "null"], "minimum": 0},
        "compile_s": MAYBE,
        "error": or_null(fields({"value": {"type": "number"}, "allowed": RATE, "measure": TEXT})),
        "seed": {"type": "integer"},
        "level": {"enum": ["smoke", "quick", "standard", "full"]},
        "threads": COUNT,
        "details": {"type": "object"},
        "machine": MACHINE,
    },
    optional=["details"],
)
"""Times in microseconds, memory in bytes, compile_s (the first call) in seconds. throughput: useful units a second."""

_PROGRAMS: dict[str, dict[str, Any]] = {
    # microseconds of the host for one operator call
    "operator_overhead": {"measured": {"type": "object", "required": ["computation_us", "fasttfm"]}},
    # microseconds of the host for one launch
    "launch_overhead": {"chip": TEXT, "measured": OBJECTS},
    # launches of a training step by route of attention
    "launch_counts": {
        "launches": {"type": "array", "items": {"type": "object", "required": ["route", "launches"]}},
    },
    # cases of kernels whose PTX was executed on a CPU, a line a chip. Of mutations of a subject's PTX: noticed or
    # missed; equivalent, which provably change nothing that is stored; unreached, which make no difference to any
    # thread with these inputs
    "executed": {
        "chip": TEXT,
        "cases": AT_LEAST_ONE,
        "passed": COUNT,
        "failed": {"type": "array", "items": TEXT},
        "mutations": {
            "type": "array",
            "items": fields(
                {
                    **dict.fromkeys(("subject", "chip", "dtype"), TEXT),
                    **dict.fromkeys(("noticed", "missed", "equivalent", "unreached"), COUNT),
                }
            ),
        },
        "seconds": POSITIVE,
        "workers": AT_LEAST_ONE,
    },
    # target tokens a second by workers and busy neighbours
    "workers": {"minutes": POSITIVE, "nice": COUNT, "measured": ROWS},
    # microseconds of a product by rows, shape and operator
    "int8_products": {"threads": COUNT, "measured": ROWS},
    # seconds and peak memory by pairs
    "preparing": {"measured": ROWS},
    # sentences a second and what clients wait (p50_ms, p99_ms)
    "serving": {"text": TEXT, "measured": ROWS},
    # losses by update of trainings that differ in one choice
    "curves": {"comparison": TEXT, "runs": RUNS},
    # minutes from text to BLEU on Multi30k's validation set
    "speedrun": {
        "seed": COUNT,
        "train_command": TEXT,
        "minutes": RATE,
        "minutes_of": {"type": "object", "additionalProperties": RATE},
        "bleu": RATE,
        "bleu_signature": TEXT,
        "updates": AT_LEAST_ONE,
        "target_tokens": AT_LEAST_ONE,
        "training_curve": CURVE,
        "note": TEXT,
    },
    # seconds of (a share of) an epoch by order of the pairs
    "padding_epoch": {
        "corpus": TEXT,
        "pairs": AT_LEAST_ONE,
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "max_tokens": AT_LEAST_ONE,
        "threads": AT_LEAST_ONE,
        "measured": ROWS,
        "published": ROWS,
    },
    # tokens a second and held-out bits per byte by provider
    "pretraining": {
        "kind": TEXT,
        "preset": TEXT,
        "text": {**TEXTS, "minItems": 1},
        "vocab_size": AT_LEAST_ONE,
        "minutes": POSITIVE,
        "measured": ROWS,
    },
    # what both tell of held-out text after equal minutes
    "gpt_and_bert": {
        "text": {**TEXTS, "minItems": 2},
        "vocab_size": AT_LEAST_ONE,
        "minutes": POSITIVE,
        "measured": {**ROWS, "minItems": 2, "maxItems": 2},
    },
    # F1 and exact match with and without pre-training
    "finetuning": {
        "preset": TEXT,
        "text": TEXTS,
        "body": or_null(TEXT),
        "minutes": or_null(POSITIVE),
        "epochs": AT_LEAST_ONE,
        "vocab_size": or_null(AT_LEAST_ONE),
        "measured": ROWS,
    },
    # BLEU and sentences/s of a teacher and its student
    "students": {"text": TEXT, "sentences": AT_LEAST_ONE, "measured": ROWS},
    # hidden tokens by a BERT, its students, and their shape without a teacher
    "distilling": {"text": TEXTS, "vocab_size": AT_LEAST_ONE, "minutes": POSITIVE, "measured": ROWS},
    # tokens a second with sentences that join a running search and without
    "continuous": {"text": TEXT, "precision": TEXT, "lines": COUNT, "measured": ROWS},
    # BLEU by test set and precision
    "precisions": {"measured": ROWS},
    # medians of the suite's rows by round, in another version's checkout and in this one
    "versions": {
        "before": TEXT,
        "after": TEXT,
        "rounds": AT_LEAST_ONE,
        "level": TEXT,
        "threshold": RATE,
        "rows": ROWS,
    },
    # what is won by keeping more between two tokens
    "reuse": {"length": COUNT, "threads": COUNT, "measured": ROWS},
    # rows by way of sharing, or a probe by minutes of training
    "encoders": {
        "comparison": {"enum": ["albert", "electra"]},
        "text": {**TEXTS, "minItems": 1},
        "vocab_size": AT_LEAST_ONE,
        "threads": AT_LEAST_ONE,
        "measured": ROWS,
        "runs": RUNS,
    },
}
"""Program `python -m benchmarks.NAME` -> what its records hold besides its name and the machine."""

_OPTIONAL = {"speedrun": ["note"], "encoders": ["measured", "runs"]}

SCHEMAS = {
    "benchmark": BENCHMARK,
    # from raw text to BLEU, by `python -m benchmarks.end_to_end`
    "end_to_end": fields(
        {
            "benchmark": {"const": "end_to_end"},
            "corpus": TEXT,
            "train_command": TEXT,
            "training_minutes": RATE,
            "updates": COUNT,
            "target_tokens": COUNT,
            "target_tokens_per_second": RATE,
            "padding": RATE,
            "translate_seconds": RATE,
            "lines": COUNT,
            "bleu": RATE,
            "bleu_signature": TEXT,
            "chrf": RATE,
            "chrf_signature": TEXT,
            "training_curve": CURVE,
            "validation_curve": {"type": "array", "items": {"type": "object"}},
            **MACHINE_FIELDS,
        },
        more=True,
    ),
    # what a version of Triton compiles, by `python -m fasttfm.kernels.proof.matrix --record FILE`
    "compile_matrix": fields(
        {
            "benchmark": {"const": "compile_matrix"},
            "command": TEXT,
            "date": MACHINE_FIELDS["time"],
            "commit": MACHINE_FIELDS["commit"],
            "triton": TEXT,
            "chips": {**TEXTS, "minItems": 1},
            "cases": AT_LEAST_ONE,
            "compiled": COUNT,
            "broken": {
                "type": "array",
                "items": fields(dict.fromkeys(("chip", "case", "dtype", "complaint"), TEXT)),
            },
        }
    ),
    # what a program of examples/ found
    "example": fields(
        {"example": TEXT, "seed": {"type": "integer"}, "updates": COUNT, "errors": OBJECTS, **MACHINE_FIELDS},
        more=True,
    ),
    **{
        name: fields({"benchmark": {"const": name}, **properties, "machine": MACHINE}, optional=_OPTIONAL.get(name, ()))
        for name, properties in _PROGRAMS.items()
    },
}
"""Kind of record -> its JSON Schema."""
