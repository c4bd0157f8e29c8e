"""CTranslate2 with our weights, written into its model format without a detour through another framework's file.

https://opennmt.net/CTranslate2/conversion.html                            specifications filled by hand
https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/specs/transformer_spec.py
https://opennmt.net/CTranslate2/python/ctranslate2.Translator.html         translate_batch and its options
https://opennmt.net/CTranslate2/quantization.html                          compute_type
https://opennmt.net/CTranslate2/performance.html                           threads, batches
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.huggingface import positions
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.models import TransformerConfig

_SPECIAL = {PAD: "<blank>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}


def convert(
    config: TransformerConfig, weights: Mapping[str, Tensor], folder: Path, *, alignment_layer: int = 0
) -> None:
    """Writes a model in torch.nn's names to folder, in float32. Raises ValueError for what is not converted here.

    alignment_layer: decoder layer, from 1, whose heads' mean it gives as attention; 0 is one head of the last one.
    """
    from ctranslate2.specs import transformer_spec

    if config.share_embeddings != "all" or config.activation != "relu":
        raise ValueError("only a shared embedding and ReLU are converted here: choose such a model")
    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers), config.heads, pre_norm=config.norm_first,
        alignment_layer=alignment_layer - 1, alignment_heads=config.heads if alignment_layer else 1,
    )  # fmt: skip
    for side, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        embeddings = stack.embeddings[0] if side == "encoder" else stack.embeddings
        embeddings.weight = _array(weights["target_embedding.weight"])
        stack.scale_embeddings = True
        stack.position_encodings.encodings = _array(positions(config))
        if config.final_norm:
            _norm(stack.layer_norm, weights, f"{side}.norm")
        for number, layer in enumerate(stack.layer):
            prefix = f"{side}.layers.{number}."
            _attention(layer.self_attention, weights, prefix + "self_attn", (3,))
            _norm(layer.self_attention.layer_norm, weights, prefix + "norm1")
            last = "norm2"
            if side == "decoder":
                _attention(layer.attention, weights, prefix + "multihead_attn", (1, 2))
                _norm(layer.attention.layer_norm, weights, prefix + "norm2")
                last = "norm3"
            _linear(layer.ffn.linear_0, weights, prefix + "linear1")
            _linear(layer.ffn.linear_1, weights, prefix + "linear2")
            _norm(layer.ffn.layer_norm, weights, prefix + last)
    spec.decoder.projection.weight = _array(weights["target_embedding.weight"])
    words = [_SPECIAL.get(i, str(i)) for i in range(config.vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.add_source_eos = False  # the sources bring their own
    spec.validate()
    spec.optimize()
    spec.save(str(folder))


def _array(x: Tensor) -> Any:
    return x.detach().float().cpu().contiguous().numpy()


def _linear(spec: Any, weights: Mapping[str, Tensor], name: str) -> None:
    spec.weight, spec.bias = _array(weights[name + ".weight"]), _array(weights[name + ".bias"])


def _norm(spec: Any, weights: Mapping[str, Tensor], name: str) -> None:
    spec.gamma, spec.beta = _array(weights[name + ".weight"]), _array(weights[name + ".bias"])


def _attention(spec: Any, weights: Mapping[str, Tensor], name: str, parts: tuple[int, ...]) -> None:
    """parts: how many of the three projections each of the spec's matrices holds: all, or queries and the rest."""
    width = weights[name + ".out_proj.weight"].shape[0]
    sizes = [part * width for part in parts]
    matrices, biases = (weights[f"{name}.in_proj_{kind}"].split(sizes) for kind in ("weight", "bias"))
    for linear, matrix, bias in zip(spec.linear, matrices, biases):
        linear.weight, linear.bias = _array(matrix), _array(bias)
    _linear(spec.linear[-1], weights, name + ".out_proj")


class Translate:
    """translate_batch() on id lists: K hypotheses of exactly `length` tokens for each source, the best first."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Tensor],
        *,
        beam: int,
        length: int,
        compute_type: str,
        device: torch.device,
        threads: int,
        workers: int = 1,
    ) -> None:
        """workers: batches translated at once, each with so many threads."""
        import ctranslate2

        with tempfile.TemporaryDirectory() as folder:
            convert(config, weights, Path(folder))
            self.translator = ctranslate2.Translator(
                folder, device=device.type, compute_type=compute_type, intra_threads=threads, inter_threads=workers
            )
        self.words = [_SPECIAL.get(i, str(i)) for i in range(config.vocab_size)]
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.options = {
            "beam_size": beam,
            "num_hypotheses": beam,
            "length_penalty": 0.0,
            "min_decoding_length": length,
            "max_decoding_length": length,
            "disable_unk": True,
            "suppress_sequences": [[_SPECIAL[PAD]], [_SPECIAL[BOS]]],
        }
        self.workers = workers

    def __call__(self, sources: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """sources: ids with end-of-sentence."""
        words = [[self.words[i] for i in source] for source in sources]
        size = 0 if self.workers == 1 else -(-len(words) // self.workers)  # 0: the whole batch at once
        result = self.translator.translate_batch(words, max_batch_size=size, **self.options)
        return [[[self.ids[word] for word in words] for words in each.hypotheses] for each in result]
