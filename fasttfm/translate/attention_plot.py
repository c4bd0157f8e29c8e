"""Pictures of who attends to whom: one panel a head, a row of panels a layer (Vaswani et al. 2017, appendix).

Every panel is a matrix of attention weights, 0 white to 1 dark, each row summing to 1. Rows are the tokens that ask,
columns those that are looked at. In the cross-attention a row is named after the token that is written from it, so
that the picture reads as an alignment of the translation with its source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.errors import UserError
from fasttfm.search.batches import inference
from fasttfm.search.search import translate_ids
from fasttfm.system.drawing import drawing, save
from fasttfm.translate.translator import Translator

KINDS = {"encoder": "encoder self-attention", "cross": "cross-attention", "decoder": "decoder self-attention"}
MOST_TOKENS = 80
"""More than this on a side and no label can be read."""
_MOST_PIXELS = 12_000  # the longer side of a picture; viewers refuse much larger ones


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention weights of one sentence and its translation."""

    weights: Mapping[str, Sequence[Tensor]]
    """Kind (see KINDS) -> a tensor (H, L, S) for each layer."""
    source: list[str]
    """Pieces of the source, end-of-sentence last."""
    read: list[str]
    """Pieces that the decoder reads, begin-of-sentence first."""
    written: list[str]
    """Pieces that the decoder writes, end-of-sentence last: read, one ahead."""
    translation: str
    """The translation as text."""

    @property
    def layers(self) -> int:
        """Layers of the deeper stack."""
        return max(len(each) for each in self.weights.values())


def attention_of(translator: Translator, sentence: str) -> Attention:
    """Translate sentence and collect the weights of every layer and head.

    Raises UserError when sentence is empty or has more tokens than a picture can show.
    """
    source = translator.source_tokenizer.encode(sentence)
    if not sentence.strip() or not source:
        raise UserError("the sentence is empty: give some text to translate")
    if len(source) > MOST_TOKENS:
        raise UserError(
            f"the sentence has {len(source):,} tokens, a picture can show {MOST_TOKENS}: give a shorter one"
        )
    read = [*source, *translator.source_tokenizer.source_end]
    target = translate_ids(translator.model, [read], translator.config)[0]
    shown = target[:MOST_TOKENS]
    with inference(translator.model) as device:
        ids = torch.tensor([read], device=device), torch.tensor([[BOS, *shown]], device=device)
        lengths = [torch.tensor([each.shape[1]], device=device) for each in ids]
        weights = translator.model.attention_weights(*ids, *lengths)
        weights = {kind: [layer[0].float().cpu() for layer in weights[kind]] for kind in KINDS}
    pieces = translator.target_tokenizer.pieces
    return Attention(
        weights=weights,
        source=[*translator.source_tokenizer.pieces(source), *("</s>" for _ in read[len(source) :])],
        read=["<s>", *pieces(shown)],
        written=pieces([*target, EOS][: len(shown) + 1]),
        translation=translator.target_tokenizer.decode(target),
    )


def draw_attention(attention: Attention, path: str | Path, layers: Sequence[int] | None = None) -> None:
    """Write path as PNG, or as what its suffix says: a row of panels for each kind and layer, a column for each head.

    layers: numbers from 1, all when None. Characters that no installed font has are written as \\u3042. Raises
    UserError for a layer that is not there, a suffix that cannot be drawn, and when matplotlib is not installed.
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

        fonts, unknown = _fonts_for(frozenset("".join(attention.source + attention.read + attention.written)))
        heads = max(weights.shape[0] for _, _, weights in rows)
        longest = max(len(attention.source), len(attention.read))
        panel = max(1.6, 0.13 * longest)  # inches; 0.13 inches hold a label of 8 points
        label = 0.085 * max(len(_readable(piece, unknown)) for piece in attention.source + attention.read) + 0.2
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
                axis.set_title(
                    f"{KINDS[kind]}, layer {layer}, head 1" if head == 0 else f"head {head + 1}",
                    fontsize=8,
                    loc="left" if head == 0 else "center",
                )
                for ticks, names, wanted, turn in (
                    (axis.yaxis, asking, head == 0, 0),
                    (axis.xaxis, looked_at, last_of_kind, 90),
                ):
                    shown = [_readable(name, unknown) for name in names] if wanted else []
                    ticks.set_ticks(range(len(names)))
                    ticks.set_ticklabels(shown, fontsize=8, rotation=turn, family=fonts, parse_math=False)
                    ticks.set_tick_params(length=2 if wanted else 0)
        figure.colorbar(ScalarMappable(Normalize(0, 1), "Blues"), ax=axes[0, -1], shrink=0.8, label="weight")
        try:
            save(figure, Path(path), Path(path).suffix[1:] or "png", dpi=min(110, _MOST_PIXELS / max(width, height)))
        except ValueError as error:
            raise UserError(f"{path}: {error}".replace("\n", " ")) from None


def _readable(piece: str, unknown: frozenset[str]) -> str:
    """piece with the characters that no font has as escapes such as \\u3042."""
    return "".join(
        character.encode("unicode_escape").decode() if character in unknown else character for character in piece
    )


@cache
def _fonts_for(characters: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Font families that together have the characters, as far as installed ones do, and the characters left over."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    families = ["DejaVu Sans"]  # comes with matplotlib
    path = font_manager.findfont("DejaVu Sans")
    missing = {each for each in characters if ord(each) not in FT2Font(path).get_charmap()}
    # Fonts made for the scripts that need one first; Last Resort has a box for everything and a sign for nothing.
    entries = [entry for entry in font_manager.fontManager.ttflist if "Last Resort" not in entry.name]
    entries.sort(key=lambda entry: ("CJK" not in entry.name, "Noto" not in entry.name, entry.name, entry.fname))
    for entry in entries:
        if not missing:
            break
        try:
            present = missing & {chr(code) for code in FT2Font(entry.fname).get_charmap()}
        except (OSError, RuntimeError):  # a damaged font file is not our business
            continue
        if present:
            families.append(entry.name)
            missing -= present
    return families, frozenset(missing)
