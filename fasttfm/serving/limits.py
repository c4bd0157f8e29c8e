"""What a server takes: one frozen dataclass."""

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
    queue: int = 1024
    """Sentences of all clients that wait: 429."""
    seconds: float = 60.0
    """Until a request must be answered: 504."""
    largest_beam: int = 16
    """Beam and nbest that a request may ask for: 422."""

    def __post_init__(self) -> None:
        for name in ("body_bytes", "sentences", "tokens", "queue", "largest_beam"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds {self.seconds} must be greater than 0")
