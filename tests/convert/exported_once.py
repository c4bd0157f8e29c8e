"""torch.onnx.export with a cache: an export takes seconds."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn


def exported_once(export: Callable[..., Any]) -> Callable[..., None]:
    """Wrap export: a graph that was written before is copied from memory."""
    cache: dict[str, bytes] = {}

    def call(module: nn.Module, given: tuple, path: Path, **options: Any) -> None:
        buffers = [(name, each.numpy().tobytes()) for name, each in sorted(module.state_dict().items())]
        key = hashlib.sha256(repr((type(module), module.config, buffers)).encode()).hexdigest()
        if key in cache:
            path.write_bytes(cache[key])
        else:
            export(module, given, path, **options)
            cache[key] = path.read_bytes()

    return call
