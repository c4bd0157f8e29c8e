"""The training log train.log.jsonl, one JSON object per line.

    {"kind": "train", "step": 50, "epoch": 1, "loss": 8.1, "nll": 7.9, "lr": 6.25e-05, "tokens_per_second": 9100, …}
    {"kind": "valid", "step": 1000, "loss": 4.2, "nll": 2.6, "bleu": 12.3, "best": true, …}
    {"kind": "resumed", "step": 1000, "lr": 0.0001}
    {"kind": "skipped", "step": 1017, "pairs": [5, 17, …]}
    {"kind": "final", "step": 8000, "loss": 3.2, "nll": 1.6, "bleu": 37.9}
    {"kind": "average", "step": 8000, "average_of": [7750, 8000], "loss": 3.1, "nll": 1.5, "bleu": 38.1}

A resumed run first drops the records after its checkpoint, so that no update is recorded twice.
"""

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from fasttfm.store.run_log import LOG_FILE, read_log
from fasttfm.system.files import replace_file


class RunLog:
    """Appends records to train.log.jsonl."""

    def __init__(self, model_dir: Path, resume_step: int, validated: int | None = None) -> None:
        """resume_step: update of the checkpoint; later records, and those of an average, are removed.

        validated: update of the checkpoint's last validation (None: resume_step), earlier if Ctrl-C saved during a
        validation; later validations are repeated. A run that starts at 0 moves existing records to another file.
        """
        self.path = model_dir / LOG_FILE
        self.previous: Path | None = None
        """File with the records of an earlier run: train.log.1.jsonl, or the next unused name."""
        records = read_log(model_dir)
        if records and resume_step == 0:
            others = (self.path.with_suffix(f".{number}{self.path.suffix}") for number in itertools.count(1))
            self.previous = next(path for path in others if not path.exists())
            os.replace(self.path, self.previous)
            records = []
        valid_step = resume_step if validated is None else validated
        newest = {**dict.fromkeys(("train", "skipped", "resumed"), resume_step), "valid": valid_step}
        kept = [r for r in records if r["step"] <= newest.get(r["kind"], -1)]
        replace_file(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; numbers that are not finite become null."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Sync the file to disk, before a checkpoint is saved that relies on it."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
