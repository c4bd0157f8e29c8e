"""A tiny recipe and its command line, which train in a second or two."""

import subprocess
import sys
from pathlib import Path

from forked import Popen, TrainingPopen, forked_children
from waiting import PATIENCE

TINY = {
    "d_model": 32, "heads": 2, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.1,
    "max_tokens": 256, "schedule": "constant", "warmup_updates": 2, "lr": 5e-3,
    "max_update": 12, "valid_interval_updates": 4, "save_interval_updates": 5, "log_interval": 3,
    "tensorboard": False, "threads": 1,
}  # fmt: skip
"""Reaches every part of the trainer in 12 updates."""


def train_command(data: Path, out: Path, **changes: object) -> list[str]:
    """The `fasttfm train` command line of the tiny recipe."""
    words = ["train", "--device", "cpu", "--data", str(data), "--out", str(out)]
    command = [sys.executable, "-m", "fasttfm", *words]
    for name, value in {**TINY, **changes}.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command.append(flag if value else f"--no-{flag[2:]}")
        else:
            command += [flag, str(value)]
    return command


def words(data: Path, out: Path, **changes: object) -> list[str]:
    """The arguments of train_command()."""
    command = train_command(data, out, **changes)
    return command[command.index("train") :]


def start(command: list[str], **options) -> Popen:
    """Start a Python command, forked like its children, with captured output; the caller waits for it."""
    if {"--workers", "--subword-sampling", "torch.distributed.run"}.intersection(command):
        options["env"] = forked_children()
    return TrainingPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(command: list[str]) -> subprocess.CompletedProcess:
    """Run a command to its end."""
    process = start(command)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
