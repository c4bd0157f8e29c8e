"""TensorBoard event files of a run, in MODEL/tensorboard."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttfm.errors import UserError
from fasttfm.training.callback import Callback


class TensorBoard(Callback):
    """Writes each number of a record as the scalar `kind/name`, unbuffered.

    torch's SummaryWriter writes from a thread, which prints its own traceback for a full disk.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        """resume_step: update to resume from; later scalars are hidden."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UserError(f"tensorboard cannot be used ({error}): give --no-tensorboard") from error
        self._event, self._summary = Event, Summary
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("ab", buffering=0))
        self._put(file_version="brain.Event:2")
        if resume_step:  # hides scalars that a killed session wrote after the checkpoint
            self._put(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def on_log(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record."""
        values = [
            self._summary.Value(tag=f"{record['kind']}/{key}", simple_value=value)
            for key, value in record.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step"
        ]
        self._put(step=record["step"], summary=self._summary(value=values))

    def on_validate(self, record: Mapping[str, Any], translations: Sequence[str]) -> None:
        """Write the numbers of a record."""
        self.on_log(record)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _put(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
