"""Classes of Hugging Face transformers that take their attention by name.

The others write attention out, and most ask transformers for a mask by name all the same: of the kind that their own
code adds to scores, while a registered one is bool. Those whose attention is something else than the product of all
queries and all keys are refused.
"""

import functools
import importlib
import inspect
import sys

import torch.nn
from transformers import PreTrainedModel

from fasttfm.interop.huggingface_products import OF_ITS_OWN

NAME = "fasttfm"
REFUSAL = f"attention {NAME!r}: {{}} computes attention in a way of its own; use 'eager' or accelerate()"
"""What a model is refused with, by the name of its class."""


@torch.compiler.assume_constant_result
@functools.cache
def custom_attention(config: type) -> str:
    """Name of a class that computes attention itself in a model configured by config; '' where there is none."""
    for family in _families(PreTrainedModel, config):
        if not family._can_set_attn_implementation():
            return family.__name__
        for kind in vars(sys.modules[family.__module__]).values():
            if isinstance(kind, type) and kind.__module__ == family.__module__ and _computes(kind, config):
                return kind.__name__
    return ""


@torch.compiler.assume_constant_result
def is_of_its_own(config: type) -> bool:
    """Return whether a model configured by config computes attention in a way that ours cannot stand for."""
    return any(family.__module__.split(".")[-2] in OF_ITS_OWN for family in _families(PreTrainedModel, config))


def _computes(kind: type, config: type) -> bool:
    """Return whether kind is a class of attention that computes it and may be configured by config, by its source."""
    if not issubclass(kind, torch.nn.Module) or not kind.__name__.endswith("Attention"):
        return False
    source = inspect.getsource(kind)
    given = inspect.get_annotations(kind.__init__).get("config")
    others = isinstance(given, type) and given is not config
    products = ("matmul(", "bmm(", "einsum(", " @ ")
    computes = "softmax(" in source and any(product in source for product in products)
    return computes and "get_interface(" not in source and not others


def _families(base: type[PreTrainedModel], config: type) -> list[type[PreTrainedModel]]:
    """The classes derived from base that are configured by config while what they are derived from is not.

    What a user derives from them computes attention as they do, and its source may be out of reach.
    """
    families: list[type[PreTrainedModel]] = []
    for kind in base.__subclasses__():
        families += [kind] if kind.config_class is config else _families(kind, config)
    return families


_TABLES = {
    "bark.modeling_bark": "BARK_ATTENTION_CLASSES",
    "data2vec.modeling_data2vec_vision": "DATA2VEC_VISION_SELF_ATTENTION_CLASSES",
    "deepseek_ocr2.modeling_deepseek_ocr2": "DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES",
    "falcon.modeling_falcon": "FALCON_ATTENTION_CLASSES",
    "git.modeling_git": "GIT_SELF_ATTENTION_CLASSES",
    "gpt_neo.modeling_gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
    "gptj.modeling_gptj": "GPTJ_ATTENTION_CLASSES",
    "sam.modeling_sam": "SAM_VISION_ATTENTION_CLASSES",
    "sam_hq.modeling_sam_hq": "SAM_HQ_VISION_ATTENTION_CLASSES",
    "superglue.modeling_superglue": "SUPERGLUE_SELF_ATTENTION_CLASSES",
    "unlimited_ocr.modeling_unlimited_ocr": "UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES",
}
"""Files of transformers that look a class of attention up in a table of their own, which would say KeyError."""


def enter_in_tables() -> None:
    """Enters NAME into the tables of the files that have one, as eager attention, which is exchanged afterwards."""
    for path, table in _TABLES.items():
        try:
            classes = getattr(importlib.import_module(f"transformers.models.{path}"), table)
        except (ImportError, AttributeError):  # another version of transformers, or a package that the file needs
            continue
        classes[NAME] = classes["eager"]
