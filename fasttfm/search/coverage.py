"""Cross-attention weights of given pairs, and the coverage penalty."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fasttfm.config.decoding import DecodingConfig
from fasttfm.errors import UserError
from fasttfm.search.batches import inference
from fasttfm.search.hypotheses import Hypothesis
from fasttfm.search.scoring import pair_batches


def cross_attention(
    model: Any, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], config: DecodingConfig
) -> list[Tensor]:
    """Cross-attention weights of each pair, (L + 1, S) float32 on the CPU.

    sources: S ids with end-of-sentence; targets: L ids without; the last row belongs to end-of-sentence. Rows sum to 1:
    the mean over the heads of config.alignment_layer. 0 is the last layer but one (of two layers the last), whose heads
    align best (Garg et al. 2019, section 3.2). An ensemble gives the mean over its models. On a CPU the bits do not
    depend on the batch. Raises UserError for a layer that does not exist.
    """
    layer = config.alignment_layer
    check_layer(model, layer)
    maps: dict[int, Tensor] = {}
    with inference(model, batch_invariant=True) as device:
        for batch, inputs in pair_batches(sources, targets, config.batch_tokens, device):
            weights = model.cross_attention(*inputs, layer=layer).cpu()
            for row, index in enumerate(batch):
                maps[index] = weights[row, : len(targets[index]) + 1, : len(sources[index])].clone()
    return [maps[index] for index in range(len(sources))]


def check_layer(model: Any, layer: int) -> None:
    """Raise UserError for a decoder layer (from 1) that does not exist; 0 is always valid."""
    if layer:
        layers = min(each.config.decoder_layers for each in getattr(model, "models", [model]))
        if layer > layers:
            raise UserError(f"decoding.alignment_layer {layer} is not there: the model has layers 1 to {layers}")


def coverage(attention: Tensor) -> float:
    """Sum over source tokens of log(min(1, attention received)), attention (L + 1, S); 0 if everything is covered.

    Source: Wu et al. 2016, equation 14.
    """
    received = attention.sum(dim=0, dtype=torch.float64)
    return received.clamp(torch.finfo(torch.float32).tiny, 1.0).log().sum().item()


def rescore_by_coverage(
    model: Any, sources: Sequence[Sequence[int]], nbest: Sequence[Sequence[Hypothesis]], config: DecodingConfig
) -> list[list[Hypothesis]]:
    """Hypotheses of each source rescored with config.coverage_penalty * coverage, best first."""
    pairs = [(index, each) for index, hypotheses in enumerate(nbest) for each in hypotheses]
    attention = cross_attention(
        model, [sources[index] for index, _ in pairs], [each.tokens for _, each in pairs], config
    )
    rescored: list[list[Hypothesis]] = [[] for _ in nbest]
    for (index, each), weights in zip(pairs, attention):
        rescored[index].append(replace(each, score=each.score + config.coverage_penalty * coverage(weights)))
    return [sorted(hypotheses, key=lambda each: -each.score) for hypotheses in rescored]
