"""Import of other tools' models: translations equal theirs, and unsupported models are refused."""

import dataclasses
import json
import shutil
from os.path import commonprefix

import numpy as np
import pytest
import torch
from model_dirs import LINES, tokenizer, write_model_dir
from safetensors.torch import load_file, save_file

from fasttfm.cli.main import main
from fasttfm.convert import ctranslate2_read, m2m100, marian
from fasttfm.convert.exchange import load, store
from fasttfm.errors import UserError
from fasttfm.translate import Translator
from fasttfm.translate.translator import one_line

from .their_folders import write_m2m, write_opus

LONGEST = 20
SEARCH = {
    "alpha": 0.0,
    "max_len_a": 0.0,
    "max_len_b": LONGEST,
    "min_len": LONGEST,
    "allow_unk": True,
    "early_stopping": False,
}
LANGUAGES = ("--source-language", "en", "--target-language", "de")


def import_(folder, form: str, out, *options: str):
    assert main(["import", str(folder), "--format", form, "--out", str(out), *options]) == 0
    return out


def translated(folder, lines: list[str], beam: int) -> list[str]:
    return [text.strip() for text in Translator.from_directory(folder, beam=beam, **SEARCH).translate(lines)]


def generated(model, pieces, lines: list[str], beam: int, **options):
    """Return the ids from Hugging Face's search with our length limits."""
    with torch.inference_mode():
        return model.generate(
            **pieces(lines, return_tensors="pt", padding=True), num_beams=beam, max_new_tokens=LONGEST,
            min_new_tokens=LONGEST, bad_words_ids=[[model.config.pad_token_id]], length_penalty=0.0, **options,
        )  # fmt: skip


def assert_equal(texts: list[str], theirs: list[str], beam: int) -> None:
    """Compare texts, without the last token of a beam search: at the length limit we add the end token's score."""
    longest_token = 4 if beam > 1 else 0
    for text, other in zip(texts, theirs, strict=True):
        same = len(commonprefix([text, other]))  # noqa: RUF071 (characters are meant)
        assert same >= max(len(text), len(other)) - longest_token
    assert len(set(texts)) > 3


# Hugging Face's Marian


@pytest.fixture(scope="module")
def opus(tmp_path_factory):
    return written(tmp_path_factory, write_opus)


def written(tmp_path_factory, write):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("theirs")
    write(folder)
    return folder


def by_marian(folder, lines, beam: int) -> list[str]:
    import transformers

    model = transformers.MarianMTModel.from_pretrained(folder)
    pieces = transformers.MarianTokenizer.from_pretrained(folder)
    results = generated(model, pieces, lines, beam)
    return [one_line(text).strip() for text in pieces.batch_decode(results, skip_special_tokens=True)]


@pytest.mark.parametrize("beam", [1, 4])
def test_an_opus_model_translates_as_it_does_in_hugging_face(tmp_path, opus, beam):
    out = import_(opus, "marian-hf", tmp_path / "model")
    lines = [*LINES, ">>deu<< a dog"]
    texts = translated(out, lines, beam)
    assert_equal(texts, by_marian(opus, lines, beam), beam)
    assert texts[-1] != texts[0]


def test_pickled_and_sharded_weights_are_read(tmp_path, opus):
    transformers = pytest.importorskip("transformers")
    for name in ("pickled", "shards"):
        shutil.copytree(opus, tmp_path / name, ignore=shutil.ignore_patterns("model.safetensors"))
    folder = tmp_path / "shards"
    torch.save(load_file(opus / "model.safetensors"), tmp_path / "pickled" / "pytorch_model.bin")
    transformers.MarianMTModel.from_pretrained(opus).save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    first, *others = (
        (import_(each, "marian-hf", tmp_path / str(number)) / "model.safetensors").read_bytes()
        for number, each in enumerate((opus, tmp_path / "pickled", folder))
    )
    assert others == [first, first]
    whole = shards[1].read_bytes()
    for content, message in (
        (whole[:-9], "is truncated"),
        (shards[0].read_bytes(), "model.safetensors.index.json disagrees"),
        (None, "is missing, but model.safetensors.index.json lists it"),
    ):
        shards[1].unlink()
        if content is not None:
            shards[1].write_bytes(content)
        with pytest.raises(UserError, match=rf"{shards[1].name}: .*{message}"):
            marian.read(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shards[1].name, f"../2/{shards[1].name}"))
    with pytest.raises(UserError, match="only files beside it are read"):
        marian.read(folder)


@pytest.mark.parametrize(("suppressed", "allowed"), [([], True), ([1], False), (None, True)])
def test_the_unknown_token_is_suppressed_by_its_id(tmp_path, opus, suppressed, allowed):
    """No file of MarianMTModel names unk_token_id: the vocabulary does."""
    shutil.copytree(opus, tmp_path / "changed")
    path = tmp_path / "changed" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "suppress_tokens": suppressed}))
    assert marian.read(tmp_path / "changed").decoding.allow_unk is allowed


def test_the_model_card_names_the_working_folder(tmp_path, opus, monkeypatch):
    monkeypatch.chdir(opus)
    card = import_(".", "marian-hf", tmp_path / "out", "--no-check") / "README.md"
    assert f"imported from {opus.name} (marian-hf)" in card.read_text(encoding="utf-8")


def test_the_damaged_one_of_two_vocabularies_is_named(tmp_path, opus):
    shutil.copytree(opus, tmp_path / "changed")
    config = tmp_path / "changed" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "share_encoder_decoder_embeddings": False}))
    (tmp_path / "changed" / "target_vocab.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"changed/target_vocab\.json: does not number its 1 pieces"):
        marian.read(tmp_path / "changed")


# M2M-100


@pytest.fixture(scope="module")
def m2m(tmp_path_factory):
    return written(tmp_path_factory, write_m2m)


def by_m2m100(folder, beam: int) -> list[str]:
    import transformers

    model = transformers.M2M100ForConditionalGeneration.from_pretrained(folder)
    pieces = transformers.M2M100Tokenizer.from_pretrained(folder, src_lang="en", tgt_lang="de")
    results = generated(model, pieces, LINES, beam, forced_bos_token_id=pieces.get_lang_id("de"))
    return [one_line(text.removeprefix("__de__")).strip() for text in pieces.batch_decode(results, True)]


@pytest.mark.parametrize("beam", [1, 4])
def test_m2m100_translates_as_it_does_in_hugging_face(tmp_path, m2m, beam):
    out = import_(m2m, "m2m100", tmp_path / "model", *LANGUAGES)
    assert_equal(translated(out, LINES, beam), by_m2m100(m2m, beam), beam)


def test_a_language_must_be_one_of_the_models(m2m):
    for target in (None, "tlh"):
        with pytest.raises(UserError, match=r"--target-language: .* give one of af"):
            m2m100.read(m2m, source_language="en", target_language=target)


# NLLB


@pytest.fixture(scope="module")
def nllb(tmp_path_factory):
    """A random model in NLLB's format: a fast tokenizer beside the SentencePiece model."""
    transformers = pytest.importorskip("transformers", minversion="5")
    folder = tmp_path_factory.mktemp("nllb")
    pieces = tokenizer().pieces(range(4, len(tokenizer())))
    rank = {piece: number for number, piece in enumerate(pieces)}
    halves = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    merges = [(one, other) for one, other in halves if one in rank and other in rank]
    vocab = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    theirs = transformers.NllbTokenizer(vocab=vocab, merges=merges, src_lang="eng_Latn", tgt_lang="deu_Latn")
    theirs.save_pretrained(folder)
    (folder / "sentencepiece.bpe.model").write_bytes(tokenizer().model)
    torch.manual_seed(3)
    config = transformers.M2M100Config(
        vocab_size=len(theirs), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, init_std=0.3,
    )  # fmt: skip
    model = transformers.M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.shared.weight[len(vocab) :] *= 0.1
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("beam", [1, 4])
def test_nllb_translates_as_it_does_in_hugging_face(tmp_path, nllb, beam):
    import transformers

    languages = ("--source-language", "eng_Latn", "--target-language", "deu_Latn")
    out = import_(nllb, "m2m100", tmp_path / "model", *languages)
    lines = LINES[:-1]  # NLLB's tokenizer lacks the bytes of the last one
    model = transformers.M2M100ForConditionalGeneration.from_pretrained(nllb)
    pieces = transformers.AutoTokenizer.from_pretrained(nllb, src_lang="eng_Latn", tgt_lang="deu_Latn")
    results = generated(model, pieces, lines, beam, forced_bos_token_id=pieces.convert_tokens_to_ids("deu_Latn"))
    target = load(out).target_tokenizer  # the same SentencePiece model, which decodes bytes
    ids = {piece: number for number, piece in enumerate(target.pieces(range(len(target))))}
    theirs = [target.decode([ids[piece] for piece in pieces.convert_ids_to_tokens(row)]) for row in results]
    assert_equal(translated(out, lines, beam), [one_line(text).strip() for text in theirs], beam)


def test_an_untied_output_is_read(tmp_path, opus):
    transformers = pytest.importorskip("transformers")
    model = transformers.MarianMTModel.from_pretrained(opus)
    shutil.copytree(opus, tmp_path / "untied")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)
    model.save_pretrained(tmp_path / "untied")
    folder = tmp_path / "untied"
    weights = load_file(folder / "model.safetensors")
    tables = {
        f"model.{side}.embed_tokens.weight": weights["model.shared.weight"].clone() for side in ("encoder", "decoder")
    }
    save_file({**weights, **tables}, folder / "model.safetensors", {"format": "pt"})
    restored = import_(folder, "marian-hf", tmp_path / "ours")
    assert_equal(translated(restored, LINES, 1), by_marian(folder, LINES, 1), 1)


def test_three_tables_of_m2m100_are_read(tmp_path, m2m):
    """tie_word_embeddings false: source, target and output may all differ."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "untied"
    shutil.copytree(m2m, folder)
    config = transformers.M2M100Config.from_pretrained(m2m)
    config.tie_word_embeddings = False
    torch.manual_seed(4)
    model = transformers.M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[-108:] *= 0.1  # codes of languages
    model.save_pretrained(folder)
    store(m2m100.read(folder, source_language="en", target_language="de"), tmp_path / "ours")
    theirs = transformers.M2M100ForConditionalGeneration.from_pretrained(folder)
    tables = [theirs.model.encoder.embed_tokens, theirs.model.decoder.embed_tokens, theirs.lm_head]
    assert not any(torch.equal(tables[i].weight, tables[j].weight) for i, j in ((0, 1), (1, 2), (0, 2)))
    assert_equal(translated(tmp_path / "ours", LINES, 1), by_m2m100(folder, 1), 1)


# CTranslate2


@pytest.mark.sample(6)
@pytest.mark.parametrize("quantization", ["int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"norm_first": True, "final_norm": True, "activation": "gelu", "positional_encoding": "tensor2tensor"},
        {"norm_first": True, "layer_norm_eps": 1e-6},
        {"share_embeddings": "none", "activation": "silu", "first_position": 2, "output_bias": True},
        {"share_embeddings": "decoder", "activation": "gelu_tanh", "d_model": 30, "heads": 3, "decoder_layers": 3},
        {"positional_encoding": "learned", "max_length": 48},
    ],
)
def test_our_exports_round_trip_in_every_quantization(tmp_path, monkeypatch, fields, quantization):
    specs = pytest.importorskip("ctranslate2.specs.model_spec")
    optimize = specs.LayerSpec.optimize
    monkeypatch.setattr(specs.LayerSpec, "optimize", lambda spec: optimize(spec, quantization=quantization))
    model_dir, folder = write_model_dir(tmp_path / "model", **fields), tmp_path / "there"
    words = ["export", str(model_dir), "--format", "ctranslate2", "--out", str(folder)]
    assert main([*words, "--no-check"]) == 0  # weights are rounded
    given, back = load(model_dir), ctranslate2_read.read(folder)
    sizes = {"max_length": back.config.max_length, "source_vocab_size": back.config.source_vocab_size}
    assert back.config == dataclasses.replace(given.config, **sizes, dropout=0.1)
    assert back.weights.keys() == given.weights.keys()
    for name, weight in given.weights.items():
        torch.testing.assert_close(back.weights[name], weight, rtol=0.01, atol=float(weight.abs().max()) / 127)


@pytest.mark.parametrize("beam", [1, 4])
def test_nllb_through_ctranslate2_takes_languages(tmp_path, nllb, beam):
    converters = pytest.importorskip("ctranslate2.converters")
    folder = tmp_path / "ct2"
    converters.TransformersConverter(str(nllb), copy_files=["sentencepiece.bpe.model"]).convert(str(folder))
    languages = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    whole, given = m2m100.read(nllb, **languages), ctranslate2_read.read(folder, **languages)
    texts = []
    for name, model in (("whole", whole), ("given", given)):
        store(model, tmp_path / name)
        texts.append(translated(tmp_path / name, LINES, beam))
    assert texts[0] == texts[1]
    for wrong, message in (
        ({}, "none was given: give one of ace_Arab"),
        ({"source_language": "tlh"}, "tlh is unknown"),
    ):
        with pytest.raises(UserError, match=message):
            ctranslate2_read.read(folder, **wrong)


HALF, ROW = np.float32(0.5), np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"decoder/scale_embeddings": np.float32(1.0)}, {}, "the decoder's embeddings are scaled by 1: only sqrt"),
        ({"encoder/scale_embeddings": np.int8(0)}, {}, "the encoder's embeddings are scaled by 1: only sqrt"),
        ({"decoder/layer_0/ffn/linear_0_noact/weight": ROW}, {}, "has the weights decoder.layer_0.ffn.linear_0_noact"),
        ({"encoder/layer_0/self_attention/relative_position_keys": ROW}, {}, "has encoder/layer_0/.*_position_keys"),
        ({"encoder/embeddings_1/weight": ROW}, {}, r"has the weights encoder\.embeddings_1\.weight"),
        ({"decoder/alibi": np.int8(1)}, {}, "decoder/alibi is not zero"),
        ({"encoder/num_heads": np.int16(1)}, {}, "encoder/num_heads and decoder/num_heads differ"),
        ({"encoder/activation": np.int8(0)}, {}, "encoder/activation and decoder/activation differ"),
        ({"encoder/position_encodings/encodings": ROW}, {}, r"encodings are \(8,\): \(positions, 32\) is needed"),
        (
            {"encoder/position_encodings/encodings": None},
            {},
            "has decoder/position_encodings/encodings but no encoder/",
        ),
        (
            {"decoder/position_encodings/encodings": None},
            {},
            "has encoder/position_encodings/encodings but no decoder/",
        ),
        (
            {
                "encoder/layer_1/ffn/linear_0/bias": ROW,
                "encoder/layer_1/ffn/linear_0/weight": np.ones((8, 32), np.float32),
                "encoder/layer_1/ffn/linear_1/weight": np.ones((32, 8), np.float32),
            },
            {},
            r"encoder\.layer_1\.ffn\.linear_0\.weight is \(8, 32\), where its configuration says \(64, 32\)",
        ),
        (
            {"decoder/start_from_zero_embedding": np.int8(0)},
            {"decoder_start_token": None},
            "decoder_start_token is null",
        ),
        ({"decoder/start_from_zero_embedding": np.int8(0)}, {"decoder_start_token": "x"}, "has no token x"),
        ({"decoder/num_heads": np.int16(5), "encoder/num_heads": np.int16(5)}, {}, "32 is not a multiple of heads 5"),
        ({}, {"layer_norm_epsilon": "x"}, "layer_norm_epsilon is .* must be a number"),
        ({"encoder/activation": np.int8(4), "decoder/activation": np.int8(4)}, {}, "activation 4 is not supported"),
        ({"encoder/newer": HALF}, {}, "has encoder/newer, which is not supported"),
        ({}, {"add_source_bos": True}, "config.json has add_source_bos True"),
        ({}, {"newer": "x"}, "config.json has newer 'x'"),
    ],
)
def test_unsupported_variables_and_settings_are_refused(tmp_path, opus, monkeypatch, changed, settings, message):
    converters = pytest.importorskip("ctranslate2.converters")
    converter = converters.TransformersConverter(str(opus), copy_files=["source.spm", "target.spm"])
    converter.convert(str(tmp_path / "ct2"))
    read, path = ctranslate2_read._read_variables, tmp_path / "ct2" / "config.json"
    monkeypatch.setattr(
        ctranslate2_read,
        "_read_variables",
        lambda path: {name: each for name, each in {**read(path), **changed}.items() if each is not None},
    )
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(UserError, match=message):
        ctranslate2_read.read(tmp_path / "ct2")
