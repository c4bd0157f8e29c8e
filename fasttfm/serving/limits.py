"""Limits of a server: one frozen dataclass."""

from dataclasses import dataclass

from fasttfm.config.checks import Count, Positive, check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Beyond these a request is refused, with the status that is named. Wrong values raise ValueError."""

    body_bytes: Count = 1 << 20
    """Bytes of a request's body: 413."""
    sentences: Count = 256
    """Texts of a request: 422."""
    tokens: Count = 512
    """Source tokens of a text: 422."""
    terms: Count = 256
    """Translations of terms in a request's terminology: 422."""
    queue: Count = 1024
    """Sentences of all clients that wait: 429."""
    seconds: Positive = 60.0
    """Until a request must be answered: 504."""
    connections: Count = 1000
    """Connections at once: 503."""
    head_seconds: Positive = 10.0
    """Until the head of a request must have come: the connection is closed."""
    largest_beam: Count = 16
    """Beam and nbest that a request may ask for: 422."""

    def __post_init__(self) -> None:
        check_fields(self)
