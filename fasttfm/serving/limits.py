"""Limits of a server: one frozen dataclass."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Beyond these a request is refused, with the status that is named. Wrong values raise ValueError."""

    body_bytes: int = 1 << 20
    """Bytes of a request's body: 413."""
    sentences: int = 256
    """Texts of a request: 422."""
    tokens: int = 512
    """Source tokens of a text: 422."""
    terms: int = 256
    """Translations of terms in a request's terminology: 422."""
    queue: int = 1024
    """Sentences of all clients that wait: 429."""
    seconds: float = 60.0
    """Until a request must be answered: 504."""
    connections: int = 1000
    """Connections at once: 503."""
    head_seconds: float = 10.0
    """Until the head of a request must have come: the connection is closed."""
    largest_beam: int = 16
    """Beam and nbest that a request may ask for: 422."""

    def __post_init__(self) -> None:
        for name in ("body_bytes", "sentences", "tokens", "terms", "queue", "connections", "largest_beam"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("seconds", "head_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)} must be a number greater than 0")
