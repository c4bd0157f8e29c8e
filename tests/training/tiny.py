"""A recipe and a command line small enough for a test: the whole path in a second or two."""

import subprocess
import sys
from pathlib import Path

from forked import Popen, TrainingPopen, forked_children
from waiting import PATIENCE

TINY = {
    "d_model": 32,
    "heads": 2,
    "d_ff": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "dropout": 0.1,
    "max_tokens": 256,
    "schedule": "constant",
    "warmup_updates": 2,
    "lr": 5e-3,
    "max_update": 12,
    "valid_interval_updates": 4,
    "save_interval_updates": 5,
    "log_interval": 3,
    "tensorboard": False,
    "threads": 1,
}
"""A recipe that goes through every part of the trainer in 12 updates."""


def train_command(data: Path, out: Path, **changes: object) -> list[str]:
    """The `fasttfm train` command line of the tiny recipe."""
    words = ["train", "--device", "cpu", "--data", str(data), "--out", str(out)]
    command = [sys.executable, "-m", "fasttfm.cli.main", *words]
    for name, value in {**TINY, **changes}.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command.append(flag if value else f"--no-{flag[2:]}")
        else:
            command += [flag, str(value)]
    return command


def start(command: list[str], **options) -> Popen:
    """Run a command, Python's, with its output captured; the caller ends or waits for it.

    The processes that it starts are forked too.
    """
    if {"--workers", "--subword-sampling", "torch.distributed.run"}.intersection(command):
        options["env"] = forked_children()
    return TrainingPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(command: list[str]) -> subprocess.CompletedProcess:
    """Run a command to its end."""
    process = start(command)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
