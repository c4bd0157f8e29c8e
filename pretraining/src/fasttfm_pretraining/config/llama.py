"""Shape of a Llama: one frozen dataclass."""

from dataclasses import dataclass

from fasttfm.config.checks import Count, Layers, Positive, Width, check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """A decoder-only language model (Touvron et al. 2023). Wrong values raise ValueError on construction.

    The defaults are Llama 2's with 7 billion parameters.
    """

    vocab_size: Count
    """Number of tokens."""
    d_model: Width = 4096
    """Width of the residual stream, a multiple of heads unless head_size is given."""
    heads: Count = 32
    """Attention heads of the queries."""
    kv_heads: Count | None = None
    """Heads of keys and values, each shared by heads / kv_heads neighbouring query heads (Ainslie et al. 2023). None:
    heads."""
    head_size: Count | None = None
    """Channels of a head, even. None: d_model / heads."""
    d_ff: Width = 11008
    """Width of the feed-forward network's hidden layer."""
    layers: Layers = 32
    """Number of layers."""
    norm_eps: Positive = 1e-5
    """Epsilon that RMSNorm adds to the mean of squares."""
    rotary_base: Positive = 10_000.0
    """Base of the rotary angles: a head's slowest pair of channels turns once in about 2 pi times N positions."""
    rotary_factor: float = 1.0
    """Divisor of the rotary angles, for texts this many times as long as in training (Chen et al. 2023)."""
    rotary_trained_length: Count | None = None
    """Length in tokens of training before scaling; pairs that turn often within it keep their angles (Llama 3.1). None:
    all are scaled."""
    rotary_low_turns: Positive = 1.0
    """Pairs that turn less often than this in rotary_trained_length are slowed by the whole factor."""
    rotary_high_turns: float = 4.0
    """Pairs that turn more often than this in rotary_trained_length are not slowed."""
    tie_embeddings: bool = False
    """Share one table between embedding and output."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""
    max_length: Count = 4096
    """Longest row or generated text in tokens."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.head_size is None and self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of heads {self.heads}")
        if self.head_width % 2:
            raise ValueError(f"a head of {self.head_width} channels: rotary positions turn pairs of them")
        if self.rotary_factor < 1:
            raise ValueError(f"rotary_factor {self.rotary_factor} must be at least 1")
        if self.rotary_high_turns <= self.rotary_low_turns:
            raise ValueError(
                f"rotary_high_turns {self.rotary_high_turns} must be above rotary_low_turns {self.rotary_low_turns}"
            )
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.groups}")

    @property
    def head_width(self) -> int:
        """Effective number of channels of a head."""
        return self.d_model // self.heads if self.head_size is None else self.head_size

    @property
    def rotary_bands(self) -> tuple[int, float, float] | None:
        """The bands of rotary_tables()."""
        if self.rotary_trained_length is None:
            return None
        return self.rotary_trained_length, self.rotary_low_turns, self.rotary_high_turns

    @property
    def groups(self) -> int:
        """Effective number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads
