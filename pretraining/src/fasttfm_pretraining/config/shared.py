"""Fields that two sections have in common."""

import dataclasses
from typing import Any


def shared_fields(config: Any, cls: type) -> dict[str, Any]:
    """Field -> value of the fields of config that the dataclass cls has too."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name in names}
