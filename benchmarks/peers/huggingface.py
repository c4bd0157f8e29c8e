"""Hugging Face's Marian model with our weights: the same post-norm Transformer, its loss and its generate().

https://huggingface.co/docs/transformers/model_doc/marian                  the model
https://huggingface.co/docs/transformers/main_classes/text_generation      generate() and its options
https://huggingface.co/docs/transformers/attention_interface               attn_implementation
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.torch_nn import summed_cross_entropy
from fasttfm.convert.marian import marian_config, marian_weights
from fasttfm.data.batches import Batch
from fasttfm.data.tokenizer import BOS, PAD, UNK
from fasttfm.models import TransformerConfig
from fasttfm.reference import positional_encoding
from fasttfm.search.batches import padded


def marian(config: TransformerConfig, weights: Mapping[str, Tensor], *, dropout: float = 0.0) -> Any:
    """transformers.MarianMTModel in eval mode, with the weights of a post-norm model (torch.nn's names).

    Attention is SDPA, the fastest without another package. Raises ValueError for models that Marian cannot represent.
    """
    from transformers import MarianConfig, MarianMTModel

    if config.norm_first or config.share_embeddings != "all":
        raise ValueError("Marian is post-norm with one shared embedding: choose such a model")
    model = MarianMTModel(MarianConfig(**marian_config(config) | {"dropout": dropout, "attn_implementation": "sdpa"}))
    # Marian orders its table of positions differently
    table = positional_encoding(config.max_length, config.d_model, config.positional_encoding)
    result = marian_weights(config, weights)
    for stack in ("encoder", "decoder"):
        result[f"model.{stack}.embed_positions.weight"] = table
    model.load_state_dict(result)
    return model.eval()


def loss(model: Any, batch: Batch, label_smoothing: float) -> Tensor:
    """Label-smoothed cross entropy summed over the target tokens, 0-d."""
    mask = None
    if batch.source_tokens < batch.source.numel():
        length = torch.arange(batch.source.shape[1], device=batch.source.device)
        mask = (length < batch.source_lengths[:, None]).long()
    logits = model(
        input_ids=batch.source, attention_mask=mask, decoder_input_ids=batch.target_in, use_cache=False
    ).logits
    return summed_cross_entropy(logits, batch.target_out, label_smoothing)


class Generate:
    """generate() on id lists: K hypotheses of exactly `length` tokens for each source, best first."""

    def __init__(self, model: Any, beam: int, length: int, *, static: bool = False) -> None:
        """static: a cache of fixed shape, with which generate() compiles its step on a GPU."""
        self.model = model
        self.options = {
            "num_beams": beam,
            "num_return_sequences": beam,
            "do_sample": False,
            "min_new_tokens": length,
            "max_new_tokens": length,
            "suppress_tokens": [PAD, UNK, BOS],
            "use_cache": True,
            **({"length_penalty": 0.0} if beam > 1 else {}),
            **({"cache_implementation": "static"} if static else {}),
        }

    def __call__(self, sources: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """sources: ids with end-of-sentence."""
        ids, lengths = padded(sources, self.model.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        with torch.inference_mode():
            result = self.model.generate(input_ids=ids, attention_mask=mask, **self.options)
        return result[:, 1:].view(len(sources), -1, result.shape[1] - 1).tolist()
