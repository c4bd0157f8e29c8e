"""What one step of translation must move and launch: weights, both caches, the scores of the vocabulary.

A step writes one token of every beam of every sentence. The encoder and the cross-attention keys and values are
computed once a sentence and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from fasttfm.kernels.proof.costs import Machine, Shape

GRAPH_LAUNCH_US = 1.5
"""From one kernel to the next in a replayed CUDA graph: published figures lie between 1 and 2; measure before use."""

_HALF = 2
_EAGER_SCORE_PASSES = 17
"""In half-precision passes over (B*beam, V): to float32 3, log_softmax 4, beam scores added 4, top-k reads 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingStep:
    """Microseconds of the parts of one step, and what a worse arrangement costs instead."""

    weights: float
    """Reading every weight of the decoder and of the output projection once."""
    products: float
    """Multiplying them; more than reading them as soon as there are many rows."""
    self_cache: float
    cross_cache: float
    """One copy a sentence, shared by its beams."""
    search: float
    """Log-softmax and the best 2*beam in one pass over half-precision logits."""
    cross_cache_copied: float
    """The cross-attention cache copied for every beam."""
    reorder: float
    """Beams reordered by copying the self-attention cache; a table of ancestors costs nothing."""
    search_eager: float
    """Log-softmax and top-k operator by operator in float32."""
    launches: int
    launches_joined: int
    """With residual and LayerNorm in the epilogue of the product before, which few rows allow."""

    @property
    def device_us(self) -> float:
        """The floor of a step without launches."""
        return max(self.weights, self.products) + self.self_cache + self.cross_cache + self.search

    def step_us(self, launch_us: float = GRAPH_LAUNCH_US) -> float:
        """A step whose launches follow each other at launch_us."""
        return self.device_us + launch_us * self.launches_joined

    @property
    def launch_share(self) -> float:
        """The share of a step in a replayed graph that is launching."""
        return 1 - self.device_us / self.step_us()


def decoding_step(
    shape: Shape, machine: Machine, *, batch: int, beam: int = 4, source: int = 27, position: int = 14
) -> DecodingStep:
    """One step at a target position (14: the mean over sentences of 27), sources of `source` tokens, half precision."""
    d, layers, rows = shape.d_model, shape.layers, batch * beam
    weights = layers * (6 * d * d + 2 * d * shape.d_ff) + shape.vocabulary * d  # cross k, v: once a sentence
    cached = layers * 2 * d * _HALF  # bytes of a token

    def moved(count: float) -> float:
        return 1e6 * count / machine.bandwidth

    self_cache, cross_cache = moved(rows * position * cached), moved(batch * source * cached)
    logits = moved(_HALF * rows * shape.vocabulary)
    return DecodingStep(
        weights=moved(_HALF * weights),
        products=1e6 * 2 * rows * weights / machine.flops,
        self_cache=self_cache,
        cross_cache=cross_cache,
        search=logits,
        cross_cache_copied=beam * cross_cache,
        reorder=2 * self_cache,
        search_eager=_EAGER_SCORE_PASSES * logits,
        # a layer: q k v, attention, output, join; q, attention, output, join; two products, join
        # a step: embedding, logits, search, the beams' table, finished sentences
        launches=11 * layers + 5,
        launches_joined=8 * layers + 5,
    )
