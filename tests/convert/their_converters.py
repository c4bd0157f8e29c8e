"""Small random models in the input formats of CTranslate2's converters.

Each builder writes the other tool's files and returns the converter object. Tools that are not installed (fairseq,
OpenNMT-tf) are replaced by stand-ins that hold weights, on which the converter's code runs.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fairseq_models
import numpy as np
import pytest
import torch
import yaml
from model_dirs import tokenizer
from torch import Tensor

from fasttfm.reference import positional_encoding

from .their_folders import write_opus

D, HEADS, INNER, LAYERS = 32, 2, 48, 2


def pieces() -> list[str]:
    return tokenizer().pieces(range(4, len(tokenizer())))


class Drawn:
    """Random weights; matrices have a larger spread than biases, and norms scatter around 1."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, *shape: int, about: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * (0.3 if len(shape) > 1 else 0.1) + about


# ------------------------------------------------------------------------------------------------- Marian and OPUS-MT


def marian_weights(draw: Drawn, size: int, *, pre: bool) -> dict[str, np.ndarray]:
    """Return a Marian model's arrays: matrices (in, out), biases and norms (1, out)."""
    suffix = "_pre" if pre else ""
    arrays = {"Wemb": draw(size, D), "decoder_ff_logit_out_b": draw(1, size)}
    norms = [f"{side}_top" for side in ("encoder", "decoder") if pre]
    for side, blocks in (("encoder", ("self",)), ("decoder", ("self", "context"))):
        for layer in (f"{side}_l{number + 1}" for number in range(LAYERS)):
            for block in blocks:
                for part in "qkvo":
                    arrays[f"{layer}_{block}_W{part}"] = draw(D, D)
                    arrays[f"{layer}_{block}_b{part}"] = draw(1, D)
                norms.append(f"{layer}_{block}_Wo")
            for part, (rows, columns) in (("1", (D, INNER)), ("2", (INNER, D))):
                arrays[f"{layer}_ffn_W{part}"], arrays[f"{layer}_ffn_b{part}"] = draw(rows, columns), draw(1, columns)
            norms.append(f"{layer}_ffn_ffn")
    for name in norms:
        end = "" if name.endswith("_top") else suffix
        arrays[f"{name}_ln_scale{end}"], arrays[f"{name}_ln_bias{end}"] = draw(1, D, about=1.0), draw(1, D)
    return {name: array.numpy() for name, array in arrays.items()}


def write_marian(folder: Path, *, pre: bool = False) -> None:
    """Write model.npz, vocab.yml and decoder.yml."""
    words = ["</s>", "<unk>", *pieces()[::-1]]
    settings = {
        "type": "transformer", "transformer-decoder-autoreg": "self-attention", "transformer-no-projection": False,
        "transformer-ffn-activation": "relu" if pre else "swish", "transformer-preprocess": "n" if pre else "",
        "transformer-postprocess": "da" if pre else "dan", "transformer-postprocess-top": "n" if pre else "",
        "transformer-postprocess-emb": "d", "transformer-guided-alignment-layer": "last", "transformer-heads": HEADS,
        "enc-depth": LAYERS, "dec-depth": LAYERS,
    }  # fmt: skip
    text = np.frombuffer(yaml.safe_dump(settings).encode() + b"\0", dtype=np.uint8)
    np.savez(folder / "model.npz", **{"special:model.yml": text}, **marian_weights(Drawn(), len(words), pre=pre))
    lines = (f"{json.dumps(word, ensure_ascii=False)}: {number}\n" for number, word in enumerate(words))
    (folder / "vocab.yml").write_text("".join(lines), encoding="utf-8")
    (folder / "decoder.yml").write_text(yaml.safe_dump({"models": ["model.npz"], "vocabs": ["vocab.yml"] * 2}))


def marian(folder: Path, _: pytest.MonkeyPatch) -> Any:
    from ctranslate2.converters import MarianConverter

    write_marian(folder, pre=True)
    return MarianConverter(str(folder / "model.npz"), [str(folder / "vocab.yml")] * 2)


def opus_mt(folder: Path, _: pytest.MonkeyPatch) -> Any:
    from ctranslate2.converters import OpusMTConverter

    write_marian(folder)
    return OpusMTConverter(str(folder))


# ------------------------------------------------------------------------------------------------------------ fairseq


def fairseq(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    from ctranslate2.converters import FairseqConverter

    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), fairseq_models.LAYERS)
    model, words = fairseq_models.write(folder, "decoder", pre=True, new=False, **sizes)
    for side in (model.encoder, model.decoder):
        side.embed_scale = fairseq_models.WIDTH**0.5
        skipped = torch.zeros(fairseq_models.PAD + 1, fairseq_models.WIDTH)  # the unused first rows
        table = torch.cat([skipped, fairseq_models.positions(64)])
        side.embed_positions = SimpleNamespace(weights=table, padding_idx=fairseq_models.PAD)
        side.layernorm_embedding = side.project_in_dim = side.project_out_dim = None
    model.load_state_dict = lambda weights: type(model).load_state_dict(model, weights, strict=False)
    sides = {name: SimpleNamespace(symbols=side) for name, side in zip(("source", "target"), words)}
    task = SimpleNamespace(**{f"{name}_dictionary": side for name, side in sides.items()})
    models = {"ARCH_MODEL_NAME_REGISTRY": {"transformer": "transformer"}, "build_model": lambda _args, _task: model}
    stand_in(patch, "fairseq", checkpoint_utils=None, models=SimpleNamespace(**models),
             tasks=SimpleNamespace(setup_task=lambda _: task))  # fmt: skip
    return FairseqConverter(str(folder / "checkpoint.pt"), str(folder), unsafe_deserialization=True)


def stand_in(patch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    patch.setitem(sys.modules, name, module)
    return module


# --------------------------------------------------------------------------------------------------------- OpenNMT-py


def opennmt_py(folder: Path, _: pytest.MonkeyPatch, start: str = "<s>", **changed: Any) -> Any:
    """start </s>: as in OpenNMT-py's fine-tuned NLLB models, whose sources have an end token."""
    from ctranslate2.converters import OpenNMTPyConverter

    draw, words = Drawn(), ["<unk>", "<blank>", "<s>", "</s>", *pieces()[::-1]]
    weights: dict[str, Tensor] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = draw(rows, columns), draw(rows)

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = draw(D, about=1.0), draw(D)

    for side, layers, blocks in (
        ("encoder", "transformer", ("self_attn",)),
        ("decoder", "transformer_layers", ("self_attn", "context_attn")),
    ):
        weights[f"{side}.embeddings.make_embedding.emb_luts.0.weight"] = draw(len(words), D)
        weights[f"{side}.embeddings.make_embedding.pe.pe"] = positional_encoding(64, D, "paper")[:, None]
        norm(f"{side}.layer_norm")
        for layer in (f"{side}.{layers}.{number}" for number in range(LAYERS)):
            for block in blocks:
                for part in ("linear_query", "linear_keys", "linear_values", "final_linear"):
                    linear(f"{layer}.{block}.{part}", D, D)
            for name in ("layer_norm",) if side == "encoder" else ("layer_norm_1", "layer_norm_2"):
                norm(f"{layer}.{name}")
            linear(f"{layer}.feed_forward.w_1", INNER, D)
            linear(f"{layer}.feed_forward.w_2", D, INNER)
            norm(f"{layer}.feed_forward.layer_norm")
    output = {"weight": draw(len(words), D), "bias": draw(len(words))}
    options = {"encoder_type": "transformer", "decoder_type": "transformer", "position_encoding": True,
               "enc_layers": LAYERS, "dec_layers": LAYERS, "heads": HEADS, "decoder_start_token": start,
               "pos_ffn_activation_fn": "gelu", **changed}  # fmt: skip
    saved = {"vocab": {"src": words, "tgt": words}, "opt": argparse.Namespace(**options), "model": weights}
    torch.save({**saved, "generator": output}, folder / "model.pt")
    return OpenNMTPyConverter(str(folder / "model.pt"), unsafe_deserialization=True)


# --------------------------------------------------------------------------------------------------------- OpenNMT-tf


def opennmt_tf(folder: Path, patch: pytest.MonkeyPatch, *, end: bool = False) -> Any:
    """A model with OpenNMT-tf's structure, empty classes and arrays as variables.

    end: source_sequence_controls add an end token to sources.
    """
    from ctranslate2.converters import OpenNMTTFConverter

    draw, words = Drawn(), ["<blank>", "<s>", "</s>", *pieces()[::-1]]
    kinds = (
        "Transformer", "LanguageModel", "SelfAttentionEncoder", "SelfAttentionDecoder", "WordEmbedder", "Vocab",
        "MultiInputter", "ParallelInputter", "ConcatReducer", "SumReducer", "PositionEmbedder",
    )  # fmt: skip
    classes = {name: type(name, (SimpleNamespace,), {}) for name in kinds}
    everything = SimpleNamespace(**classes, MultiHeadAttentionReduction=SimpleNamespace(
        AVERAGE_ALL_LAYERS=1, AVERAGE_LAST_LAYER=2))  # fmt: skip
    names = ("models", "encoders", "decoders", "inputters", "layers", "data")
    stand_in(patch, "opennmt", **dict.fromkeys(names, everything))

    def variable(*shape: int, about: float = 0.0) -> Any:
        value = draw(*shape, about=about)
        return SimpleNamespace(numpy=value.numpy)

    def dense(columns: int, rows: int, **more: Any) -> Any:
        return SimpleNamespace(kernel=variable(columns, rows), bias=variable(rows), transpose=False, **more)

    def norm() -> Any:
        return SimpleNamespace(gamma=variable(D, about=1.0), beta=variable(D))

    def wrapped(layer: Any) -> Any:
        return SimpleNamespace(layer=layer, input_layer_norm=norm(), output_layer_norm=None)

    def attention() -> Any:
        linears = {f"linear_{part}": dense(D, D) for part in ("queries", "keys", "values", "output")}
        return wrapped(SimpleNamespace(num_heads=HEADS, maximum_relative_position=None, **linears))

    def feed_forward() -> Any:
        inner = dense(D, INNER, activation=SimpleNamespace(__name__="relu"))
        return wrapped(SimpleNamespace(inner=inner, outer=dense(INNER, D)))

    def layer(*crossed: Any) -> Any:
        return SimpleNamespace(self_attention=attention(), attention=list(crossed), ffn=feed_forward())

    def embedder() -> Any:
        listed = classes["Vocab"](words=list(words))
        return classes["WordEmbedder"](
            vocabulary_file=listed, mark_start=False, mark_end=end, embedding=variable(len(words) + 1, D)
        )

    positions = SimpleNamespace()  # sinusoids have no variable
    encoder = classes["SelfAttentionEncoder"](
        layers=[layer() for _ in range(LAYERS)], layer_norm=norm(), position_encoder=positions
    )
    decoder = classes["SelfAttentionDecoder"](
        layers=[layer(attention()) for _ in range(LAYERS)], layer_norm=norm(), position_encoder=positions,
        attention_reduction=0, output_layer=dense(D, len(words) + 1),
    )  # fmt: skip
    return OpenNMTTFConverter(classes["Transformer"](
        encoder=encoder, decoder=decoder, features_inputter=embedder(), labels_inputter=embedder()
    ))  # fmt: skip


# ------------------------------------------------------------------------------------------------------ transformers


def transformers(folder: Path, _: pytest.MonkeyPatch) -> Any:
    from ctranslate2.converters import TransformersConverter

    write_opus(folder)
    return TransformersConverter(str(folder))


TRANSLATION: dict[str, Callable[..., Any]] = {
    "fairseq": fairseq,
    "marian": marian,
    "opennmt_py": opennmt_py,
    "opennmt_tf": opennmt_tf,
    "opus_mt": opus_mt,
    "transformers": transformers,
}
"""Converter of translation models -> builder."""


def converted(name: str, folder: Path, patch: pytest.MonkeyPatch, quantization: str | None = None, **how: Any) -> Path:
    """Run a converter and add the SentencePiece models to its output directory."""
    source, out = folder / f"{name}-source", folder / f"{name}-{quantization}"
    source.mkdir()
    build = TRANSLATION[name]
    with patch.context() as inside:
        build(source, inside, **how).convert(str(out), quantization=quantization)
    for side in ("source", "target"):
        (out / f"{side}.spm").write_bytes(tokenizer().model)
    shutil.rmtree(source)
    return out
