"""Import of what CTranslate2's converters write, in every quantization: translations and scores equal CTranslate2's."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fairseq_models import positions as tensor2tensor
from model_dirs import LINES, tokenizer

from fasttfm.cli.main import main
from fasttfm.config.decoding import DecodingConfig
from fasttfm.convert.ctranslate2_read import read, vocabulary
from fasttfm.data.tokenizer import BOS, EOS, PAD, train_tokenizer
from fasttfm.models import Transformer
from fasttfm.reference import positional_encoding
from fasttfm.search.search import search_ids
from fasttfm.system.files import read_json
from fasttfm.translate import Translator

from .their_folders import write_opus

ctranslate2 = pytest.importorskip("ctranslate2")
converters = pytest.importorskip("ctranslate2.converters")
pytest.importorskip("transformers")
from ctranslate2.specs import common_spec, model_spec, transformer_spec  # noqa: E402

QUANTIZATIONS = (None, *model_spec.ACCEPTED_MODEL_TYPES)
LONGEST = 12
CLOSE = {"float16": 0.02, "bfloat16": 0.15}
"""Tolerance of log-probabilities if positions were rounded, because we recompute sinusoids; otherwise 1e-4."""
D, HEADS, INNER, LAYERS = 32, 2, 48, 2
SIZES = {
    "self_attention/linear_0": (3 * D, D), "attention/linear_1": (2 * D, D), "ffn/linear_0": (INNER, D),
    "ffn/linear_1": (D, INNER),
}  # fmt: skip
"""Matrices other than (D, D)."""
PIECES = tokenizer().pieces(range(4, len(tokenizer())))[::-1]


class Kind(NamedTuple):
    """What a converter of CTranslate2 4.8 writes for a small model of its tool."""

    words: tuple[list[str], list[str]]
    """Vocabularies of source and target."""
    options: dict[str, Any]
    """Of the specification."""
    encodings: Any = model_spec.OPTIONAL
    """Positions; without them CTranslate2 makes sinusoids."""
    settings: dict[str, Any] = {}  # noqa: RUF012 (of a tuple)
    """Of config.json."""
    bias: bool = True
    """Of the output."""
    joint: bool = False
    """One table for both sides and the output, and decoders that start from a zero embedding, as in Marian."""
    scale: bool | float = True
    """Of the embeddings."""


RELU, GELU, SILU = common_spec.Activation.RELU, common_spec.Activation.GELU, common_spec.Activation.SWISH
FAIRSEQ, MARIAN = ["<s>", "<blank>", "</s>", "<unk>"], ["</s>", "<unk>", *PIECES]
OPENNMT_PY, OPENNMT_TF = ["<unk>", "<blank>", "<s>", "</s>", *PIECES], ["<blank>", "<s>", "</s>", *PIECES, "<unk>"]
INTERLEAVED = positional_encoding(2048, D, "paper")
HALVES = torch.cat([INTERLEAVED[:, 0::2], INTERLEAVED[:, 1::2]], dim=1)
ENDED = {"add_source_eos": True}
KINDS = {
    "fairseq": Kind(
        ([*FAIRSEQ, *PIECES], [*FAIRSEQ, *PIECES[5:], *PIECES[:5], "madeupword0000"]), {"alignment_heads": 0},
        bias=False, encodings=tensor2tensor(64), settings={"decoder_start_token": "</s>", **ENDED}, scale=D**0.5,
    ),
    "marian": Kind((MARIAN, MARIAN), {"activation": RELU}, HALVES, ENDED, joint=True),
    "opennmt_py": Kind((OPENNMT_PY, OPENNMT_PY), {"activation": GELU}, INTERLEAVED[:64]),
    "opennmt_tf": Kind((OPENNMT_TF, OPENNMT_TF), {"activation": RELU}),
    "opus_mt": Kind((MARIAN, MARIAN), {"pre_norm": False, "activation": SILU}, HALVES, ENDED, joint=True),
}  # fmt: skip


def specified(kind: Kind) -> Any:
    """A specification with random weights: larger ones in matrices than in biases, and norms around 1."""
    spec = transformer_spec.TransformerSpec.from_config((LAYERS, LAYERS), HEADS, **kind.options)
    draw = torch.Generator().manual_seed(3)

    def fill(part: Any, name: str, value: Any) -> None:
        above, layer, attribute = ["", *name.split("/")][-3:]
        rows = len(kind.words[name.startswith("decoder")])
        of_words = layer.startswith(("embeddings", "projection"))
        rows, columns = (rows, D) if of_words else SIZES.get(f"{above}/{layer}", (D, D))
        if attribute == "weight":
            part.weight = torch.randn(rows, columns, generator=draw) * 0.3
        elif attribute in ("bias", "beta", "gamma") and (kind.bias or layer != "projection"):
            size = rows if attribute == "bias" else D
            setattr(part, attribute, torch.randn(size, generator=draw) * 0.1 + (attribute == "gamma"))
        elif attribute == "encodings":
            part.encodings = kind.encodings

    model_spec.visit_spec(spec, fill)
    encoder, decoder = spec.encoder, spec.decoder
    encoder.scale_embeddings = decoder.scale_embeddings = kind.scale
    decoder.start_from_zero_embedding = kind.joint
    if kind.joint:
        decoder.embeddings.weight = encoder.embeddings[0].weight
    if kind.joint or not kind.bias:
        decoder.projection.weight = decoder.embeddings.weight
    for name, value in kind.settings.items():
        setattr(spec.config, name, value)
    spec.register_source_vocabulary(kind.words[0])
    spec.register_target_vocabulary(kind.words[1])
    return spec


def converted(name: str, folder: Path, quantization: str | None = None, **settings: Any) -> Path:
    """Write what a converter writes, with the SentencePiece models. settings: others of config.json."""
    out = folder / f"{name}-{quantization}"
    if name == "transformers":
        (folder / "opus").mkdir()
        write_opus(folder / "opus")
        converters.TransformersConverter(str(folder / "opus")).convert(str(out), quantization=quantization)
    else:
        spec = specified(KINDS[name]._replace(settings=KINDS[name].settings | settings))
        spec.validate()
        spec.optimize(quantization)
        out.mkdir()
        spec.save(str(out))
    for side in ("source", "target"):
        (out / f"{side}.spm").write_bytes(tokenizer().model)
    return out


def compare(folder: Path, close: float = 1e-4) -> str:
    """Compare tokens and scores of three translations with CTranslate2's; returns the kind of positions."""
    model = read(folder)
    network = Transformer(model.config)
    network.load_state_dict(model.weights, strict=False)
    network.eval()
    ids = [model.source_tokenizer.encode(line) for line in LINES[:3]]
    greedy = DecodingConfig(beam=1, length_penalty="none", max_len_a=0.0, max_len_b=LONGEST, allow_unk=True)
    end = model.source_tokenizer.source_end
    ours = [found[0].tokens for found in search_ids(network, [[*each, *end] for each in ids], greedy)]

    source, target = (each.pieces(range(len(each))) for each in (model.source_tokenizer, model.target_tokenizer))
    theirs = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    adds_end = read_json(folder / "config.json")["add_source_eos"]
    sources = [[source[number] for number in (each if adds_end else [*each, *end])] for each in ids]
    their_pieces = vocabulary(folder, "target")
    never = [[target[number]] for number in (PAD, BOS) if target[number] in their_pieces]
    answers = theirs.translate_batch(
        sources, beam_size=1, max_decoding_length=LONGEST, suppress_sequences=never or None
    )  # fmt: skip
    targets = [[target[number] for number in each] for each in ours]
    for answer, written in zip(answers, targets, strict=True):
        assert answer.hypotheses[0][: LONGEST - 1] == written[: LONGEST - 1]
    for score, each, tokens in zip(theirs.score_batch(sources, targets), ids, ours, strict=True):
        with torch.inference_mode():
            logits = network(torch.tensor([[*each, *end]]), torch.tensor([[BOS, *tokens]]))[0]
        log_probabilities = logits.log_softmax(-1)[range(len(tokens) + 1), [*tokens, EOS]]
        torch.testing.assert_close(torch.tensor(score.log_probs), log_probabilities, rtol=1e-4, atol=close)
    return model.config.positional_encoding


@pytest.mark.sample(6)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", [*KINDS, "transformers"])
def test_translations_and_scores_equal_ctranslate2_s(name, quantization, tmp_path):
    close = CLOSE.get(str(quantization).rpartition("_")[2], 1e-4)
    positions = compare(converted(name, tmp_path, quantization), close)
    assert positions == ("tensor2tensor" if name in ("fairseq", "opennmt_tf") else "paper")


@pytest.mark.parametrize(
    ("name", "settings", "ended"),
    [
        ("opennmt_py", {}, False),
        ("opennmt_py", {"decoder_start_token": "</s>"}, True),  # as its fine-tuned NLLB models have it
        ("opennmt_tf", {}, False),
        ("opennmt_tf", ENDED, True),
    ],
)
def test_sources_have_an_end_token_if_the_model_was_trained_with_one(name, settings, ended, tmp_path):
    folder = converted(name, tmp_path, **settings)
    assert read(folder).source_tokenizer.source_end == [EOS] * ended
    compare(folder)


def test_a_model_without_source_end_translates_and_exports_but_cannot_be_trained(tmp_path, capsys, refusal_of):
    model, there = tmp_path / "model", tmp_path / "there"
    given = converted("opennmt_py", tmp_path)
    assert main(["import", str(given), "--format", "ctranslate2", "--out", str(model)]) == 0
    assert "sources have no end token" in capsys.readouterr().out
    ours = Translator.from_directory(model)
    assert ours.translate(["", "a dog"])[0] == ""
    assert ours.score(["", "a dog"], ["", "ein Hund"])[0] < 0
    assert main(["export", str(model), "--format", "ctranslate2", "--out", str(there)]) == 0
    assert "3 texts are translated as" in capsys.readouterr().out
    assert "sources without an end" in refusal_of(["export", model, "--format", "marian-hf", "--out", tmp_path / "hf"])
    (tmp_path / "t").write_text("a dog\n" * 9)
    words = ["prepare", *(f"--{each}={tmp_path / 't'}" for each in ("src", "tgt", "valid-src", "valid-tgt"))]
    told = refusal_of([*words, "--spm", model / "spm.src.model", "--out", tmp_path / "data"])
    assert "its sources have no end-of-sentence token" in told


def test_another_model_s_sentencepiece_model_is_refused(tmp_path, refusal_of):
    folder = converted("opus_mt", tmp_path)
    words = ["import", folder, "--format", "ctranslate2", "--out", tmp_path / "MODEL"]
    for lines, told in (
        (
            ["日本語の文字ばかりの文章です", "次の行もそうです"],
            "4% of its pieces are in the vocabulary, 50% are needed",
        ),
        (LINES, "have 31% of the vocabulary's pieces, 85% are needed"),
    ):
        for side in ("source", "target"):
            (folder / f"{side}.spm").write_bytes(train_tokenizer(lines, vocab_size=285 + 5 * (lines is LINES)).model)
        assert told in refusal_of(words)
