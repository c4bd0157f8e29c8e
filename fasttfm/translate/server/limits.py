"""Limits of a server."""

from dataclasses import dataclass

from fasttfm.config.checks import Count, Positive, check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """A request beyond these limits is refused with the given status. Invalid values raise ValueError."""

    body_bytes: Count = 1 << 20
    """Bytes of a request body; more get status 413."""
    sentences: Count = 256
    """Texts in a request; more get status 422."""
    tokens: Count = 512
    """Source tokens in a text; more get status 422."""
    terms: Count = 256
    """Translations of terms in a request's terminology; more get status 422."""
    queue: Count = 1024
    """Waiting sentences of all clients; more get status 429."""
    seconds: Positive = 60.0
    """Seconds for a request; a longer one gets status 504."""
    connections: Count = 1000
    """Open connections; more get status 503."""
    head_seconds: Positive = 10.0
    """Seconds for the head of a request to arrive; then the connection is closed."""
    largest_beam: Count = 16
    """Beam and nbest of a request; more get status 422."""

    def __post_init__(self) -> None:
        check_fields(self)
