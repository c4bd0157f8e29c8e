"""Check of an import or export: transformers and this model must score three texts alike.

The texts are tokens in a fixed random order. Logits are compared, or hidden states if the heads differ from the
folder's.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.convert.check import computing_in
from fasttfm.errors import UserError
from fasttfm.system.files import read_json
from fasttfm_pretraining.interop.bert import TransformersModel
from fasttfm_pretraining.models.bert import MaskedHead
from fasttfm_pretraining.models.heads import Answerer
from fasttfm_pretraining.models.language_model import LanguageModel

_TEXTS, _TOKENS = 3, 12
_TOLERANCE = 1e-3
"""Tolerance relative to the largest score: float32 sums in another order over dozens of layers."""

Scores = Callable[[Tensor], Mapping[str, Tensor]]
"""Maps tokens (B, L) to scores by output name of transformers."""


def check_language_model(model: LanguageModel, folder: Path) -> list[str]:
    """Compare a GPT or Llama with its Hugging Face folder, as check() does."""
    return check(folder, "AutoModelForCausalLM", lambda tokens: {"logits": model(tokens)}, model)


def check_part(part: TransformersModel, folder: Path) -> list[str]:
    """Compare one of bert.parts(), or a model with its head, with a folder, as check() does.

    If the folder's class has another head, such as that of a task, hidden states are compared.
    """
    architectures = read_json(folder / "config.json").get("architectures") or [""]
    sides = {"ForPreTraining": "AutoModelForPreTraining", "ForMaskedLM": "AutoModelForMaskedLM"}
    if part.task_head is not None:
        kind = f"AutoModel{part.task_head[0]}"
    else:
        ending = next((each for each in sides if str(architectures[0]).endswith(each)), "")
        kind = sides[ending] if ending and part.head is not None else "AutoModel"
    return check(folder, kind, lambda tokens: _scores(part, kind, tokens), part.body)


def _scores(part: TransformersModel, kind: str, tokens: Tensor) -> dict[str, Tensor]:
    body, head = part.body, part.head
    hidden = body(tokens)
    if part.task_head is not None:
        model: Any = part.task_head[1]
        if isinstance(model, Answerer):
            starts, ends = model.span(hidden).unbind(-1)
            return {"start_logits": starts, "end_logits": ends}
        return {"logits": model.classifier(body.pooled(hidden))}
    if kind == "AutoModel":
        return {"last_hidden_state": hidden}
    if not isinstance(head, MaskedHead):
        return {"logits": head(hidden)}  # type: ignore[misc]
    masked = head(hidden, body.embeddings.word.weight)
    if kind == "AutoModelForMaskedLM" or part.kind == "electra":
        return {"logits": masked}
    scores = {"prediction_logits": masked}
    if part.sentence is not None:
        name = "sop_logits" if part.kind == "albert" else "seq_relationship_logits"
        scores[name] = part.sentence(body.pooled(hidden))
    return scores


def check(folder: Path, kind: str, scores: Scores, model: Any) -> list[str]:
    """Compare the scores of three texts with transformers. Returns lines for the user.

    kind: the class, such as AutoModel. model: computes scores(). Raises UserError if transformers cannot load the
    folder or its scores differ.
    """
    if find_spec("transformers") is None:
        return ["not compared with transformers, which is not installed"]
    config = model.config
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (_TEXTS, min(_TOKENS, config.max_length)), generator=drawn, device="cpu")
    pad = getattr(config, "pad_id", None)
    tokens = tokens.masked_fill(tokens == pad, (pad or 0) + 1) if pad is not None else tokens
    mode = model.training
    with computing_in("transformers", "load this model"):
        theirs = _their_scores(folder, kind, tokens)
    model.eval()
    with torch.inference_mode():
        for name, ours in scores(tokens).items():
            other = theirs[name].float().view(ours.shape)
            if not bool((ours - other).abs().max() <= _TOLERANCE * other.abs().max().clamp(min=1.0)):
                raise UserError(
                    f"transformers' {name} of three texts are not those of this model here: report it; --no-check "
                    "leaves the comparison out"
                )
    model.train(mode)
    return [f"{_TEXTS} texts are scored as transformers scores them"]


def _their_scores(folder: Path, kind: str, tokens: Tensor) -> Any:
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        network = getattr(transformers, kind).from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
        return network.eval()(tokens[None] if kind.endswith("MultipleChoice") else tokens)
    finally:
        transformers.logging.set_verbosity(level)
