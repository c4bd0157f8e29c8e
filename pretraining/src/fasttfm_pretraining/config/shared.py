"""Fields common to two sections."""

import dataclasses
from typing import Any


def shared_fields(config: Any, cls: type) -> dict[str, Any]:
    """Values of the fields that config shares with the dataclass cls, by name."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name in names}
