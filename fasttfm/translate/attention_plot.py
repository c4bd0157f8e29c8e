"""Plots of attention weights: one panel per head, one row of panels per layer (Vaswani et al. 2017, appendix).

A panel is a matrix of weights, 0 white to 1 dark, whose rows sum to 1: queries by keys. In cross-attention a row is
labelled with the token written from it, so the plot reads as an alignment of the translation with its source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.data.unicode_forms import has_text
from fasttfm.errors import UserError
from fasttfm.search.batches import inference
from fasttfm.search.search import search_ids
from fasttfm.system.drawing import drawing, save
from fasttfm.translate.translator import Translator

KINDS = {"encoder": "encoder self-attention", "cross": "cross-attention", "decoder": "decoder self-attention"}
MOST_TOKENS = 80
"""Maximum tokens per side; labels are unreadable beyond."""
_MOST_PIXELS = 12_000  # longer side of the image; many viewers reject larger ones


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention weights of a sentence and its translation."""

    weights: Mapping[str, Sequence[Tensor]]
    """Kind (see KINDS) -> one tensor (H, L, S) per layer."""
    source: list[str]
    """Pieces of the source, end-of-sentence last."""
    read: list[str]
    """Pieces that the decoder reads, begin-of-sentence first."""
    written: list[str]
    """Pieces that the decoder writes, end-of-sentence last: `read` shifted by one."""
    translation: str
    """Text of the translation."""

    @property
    def layers(self) -> int:
        """Number of layers of the deeper stack."""
        return max(len(each) for each in self.weights.values())


def attention_of(translator: Translator, sentence: str) -> Attention:
    """Translate a sentence and collect the weights of all layers and heads.

    Raises UserError if it is empty or too long to plot.
    """
    tokenizer = translator.source_tokenizer
    source = [*tokenizer.prefix, *tokenizer.encode(sentence)]
    if not has_text(sentence) or len(source) == len(tokenizer.prefix):
        raise UserError("the sentence is empty: give some text to translate")
    if len(source) > MOST_TOKENS:
        raise UserError(
            f"the sentence has {len(source):,} tokens, a picture can show {MOST_TOKENS}: give a shorter one"
        )
    read = [*source, *tokenizer.source_end]
    target = search_ids(translator.model, [read], translator.config, prefixes=[translator.beginning("")])[0][0].tokens
    shown = target[:MOST_TOKENS]
    with inference(translator.model) as device:
        ids = torch.tensor([read], device=device), torch.tensor([[BOS, *shown]], device=device)
        lengths = [torch.tensor([each.shape[1]], device=device) for each in ids]
        weights = translator.model.attention_weights(*ids, *lengths)
        weights = {kind: [layer[0].float().cpu() for layer in weights[kind]] for kind in KINDS}
    pieces = translator.target_tokenizer.pieces
    return Attention(
        weights=weights,
        source=[*tokenizer.pieces(source), *("</s>" for _ in read[len(source) :])],
        read=["<s>", *pieces(shown)],
        written=pieces([*target, EOS][: len(shown) + 1]),
        translation=translator.target_tokenizer.decode(target),
    )


def draw_attention(attention: Attention, path: str | Path, layers: Sequence[int] | None = None) -> None:
    """Write a PNG, or the format of the path's suffix: one row of panels per kind and layer, one column per head.

    layers: numbers from 1; None: all. Characters that no installed font has are drawn as boxes. Raises UserError for a
    layer that does not exist, an unsupported suffix, or if matplotlib is not installed.
    """
    chosen = list(range(1, attention.layers + 1)) if layers is None else list(layers)
    for layer in chosen:
        if not 1 <= layer <= attention.layers:
            raise UserError(f"layer {layer} is not there: the model has layers 1 to {attention.layers}")
    rows = [
        (kind, layer, attention.weights[kind][layer - 1])
        for kind in KINDS
        for layer in chosen
        if layer <= len(attention.weights[kind])
    ]
    labels = {
        "encoder": (attention.source, attention.source),
        "cross": (attention.written, attention.source),
        "decoder": (attention.read, attention.read),
    }
    with drawing(layout="constrained") as figure:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.font_manager import get_font_names

        fonts = ["DejaVu Sans", *sorted(get_font_names(), key=lambda n: ("Last Resort" in n, "CJK" not in n, n))]
        heads = max(weights.shape[0] for _, _, weights in rows)
        longest = max(len(attention.source), len(attention.read))
        panel = max(1.6, 0.13 * longest)  # inches; 0.13 inches hold a label of 8 points
        label = 0.085 * max(map(len, attention.source + attention.read)) + 0.2
        width, height = 0.6 + label + heads * (panel + 0.12), 1.0 + len(rows) * (panel + 0.3) + 3 * label
        figure.set_size_inches(width, height)
        axes = figure.subplots(len(rows), heads, squeeze=False)
        for row, (kind, layer, weights) in enumerate(rows):
            asking, looked_at = labels[kind]
            last_of_kind = row + 1 == len(rows) or rows[row + 1][0] != kind
            for head, axis in enumerate(axes[row]):
                if head >= weights.shape[0]:
                    axis.set_axis_off()
                    continue
                axis.imshow(weights[head].numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
                title, place = (
                    (f"head {head + 1}", "center") if head else (f"{KINDS[kind]}, layer {layer}, head 1", "left")
                )
                axis.set_title(title, fontsize=8, loc=place)
                for ticks, names, labelled, turn in (
                    (axis.yaxis, asking, head == 0, 0),
                    (axis.xaxis, looked_at, last_of_kind, 90),
                ):
                    ticks.set_ticks(range(len(names)))
                    ticks.set_ticklabels(
                        names if labelled else [], fontsize=8, rotation=turn, family=fonts, parse_math=False
                    )
                    ticks.set_tick_params(length=2 if labelled else 0)
        figure.colorbar(ScalarMappable(Normalize(0, 1), "Blues"), ax=axes[0, -1], shrink=0.8, label="weight")
        try:
            save(figure, Path(path), Path(path).suffix[1:] or "png", dpi=min(110, _MOST_PIXELS / max(width, height)))
        except ValueError as error:
            raise UserError(f"{path}: {error}".replace("\n", " ")) from None
