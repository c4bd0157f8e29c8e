"""The models of Hugging Face transformers that take their attention by name, as their classes declare it.

The others write their attention out and stay on eager: by name they are refused, and accelerate() leaves them theirs.
"""

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

NAME = "fasttfm"
WITH_TABLES = frozenset({
    "deepseek_ocr2_sam_vision_model", "git", "sam_hq_vision_model", "sam_vision_model",
    "unlimited_ocr_sam_vision_model",
})  # fmt: skip
"""Types of models whose files have a table of attention classes beside others that take it by name."""
NEEDS = {"minimax_m3_vl_text": "block_indices"}
"""Types of models of transformers 5.23 whose attention needs an argument that ours has not, and which."""


def own_attention(part: PreTrainedModel) -> str:
    """Say why ours cannot stand for the attention of a model or a part of one; '' where it can."""
    if kind := written_out(type(part.config)) if part._can_set_attn_implementation() else type(part).__name__:
        return f"{kind} writes its attention out"
    option = NEEDS.get(part.config.model_type)
    return f"{type(part).__name__} needs {option}, which attention {NAME!r} has not" if option else ""


def written_out(config: type[Any]) -> str:
    """Name of a class of models configured by config that does not take its attention by name; '' where all do."""
    for family in _families(PreTrainedModel, config):
        if config.model_type in WITH_TABLES or not family._can_set_attn_implementation():
            return family.__name__
    return ""


@torch.compiler.assume_constant_result
@functools.cache
def takes_bool_masks(config: type[Any]) -> bool:
    """Return whether the models configured by config say that they take SDPA's masks, or those of any attention.

    A model that says neither may add its mask to scores in code of its own.
    """
    return all(each._supports_sdpa or each._supports_attention_backend for each in _families(PreTrainedModel, config))


def _families(base: type[PreTrainedModel], config: type[Any]) -> list[type[PreTrainedModel]]:
    """The classes derived from base that are configured by config while what they are derived from is not.

    What a user derives from them computes attention as they do, and its source may be out of reach.
    """
    families: list[type[PreTrainedModel]] = []
    for kind in base.__subclasses__():
        families += [kind] if kind.config_class is config else _families(kind, config)
    return families
