"""The record of a run: train.log.jsonl, one JSON object a line, and the same numbers for TensorBoard.

    {"kind": "train", "step": 50, "epoch": 1, "loss": 8.1, "nll": 7.9, "lr": 6.25e-05, "tokens_per_second": 9100, …}
    {"kind": "valid", "step": 1000, "loss": 4.2, "nll": 2.6, "bleu": 12.3, "best": true, …}
    {"kind": "average", "step": 8000, "average_of": [7750, 8000], "loss": 3.1, "nll": 1.5, "bleu": 38.1}

A resumed run first drops what lies behind its checkpoint, so that no update is ever recorded twice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

LOG_FILE = "train.log.jsonl"


def read_log(model_dir: str | Path) -> list[dict[str, Any]]:
    """All records of a model directory, oldest first; a line that a kill or a power cut damaged is left out."""
    path = Path(model_dir) / LOG_FILE
    records = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record and isinstance(record.get("step"), int):
            records.append(record)
    return records


class RunLog:
    """Appends records to train.log.jsonl and, if asked, to TensorBoard event files below MODEL/tensorboard."""

    def __init__(self, model_dir: Path, tensorboard: bool, resume_step: int, validated: int | None = None) -> None:
        """resume_step: update that the run goes on from; records of later ones and of an average are removed.

        validated: update of the last validation that the checkpoint knows of, resume_step when None; it is earlier when
        Ctrl-C saved in the middle of a validation, and one that was recorded after that is done again.
        """
        self.path = model_dir / LOG_FILE
        newest = {"train": resume_step, "valid": resume_step if validated is None else validated}
        kept = [r for r in read_log(model_dir) if r["step"] <= newest.get(r["kind"], -1)]
        temporary = self.path.with_name(f".{self.path.name}")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, self.path)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._writer = _event_writer(model_dir / "tensorboard", resume_step) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; numbers that are not finite are written as null."""
        plain = {key: None if isinstance(value, float) and value != value else value for key, value in record.items()}
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()
        if self._writer is not None:
            for key, value in record.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step":
                    self._writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    def flush(self) -> None:
        """Put everything on the disk; done before a checkpoint is saved, which counts on these records."""
        os.fsync(self._file.fileno())
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _event_writer(folder: Path, resume_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # imported late: it takes a second

    # purge_step tells TensorBoard to hide what a killed session wrote behind the checkpoint
    return SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)
