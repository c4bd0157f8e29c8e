"""Import of other tools' models: translations equal theirs, and unsupported models are refused."""

import json
import shutil
from os.path import commonprefix

import numpy as np
import pytest
import torch
from model_dirs import LINES, tokenizer
from safetensors.torch import load_file, save_file

from fasttfm.cli.main import main
from fasttfm.convert import ctranslate2_read, m2m100, marian
from fasttfm.convert.exchange import load, store
from fasttfm.cpu import step_passes
from fasttfm.errors import UserError
from fasttfm.search.batches import inference
from fasttfm.search.decoder import decoder_of
from fasttfm.translate import Translator
from fasttfm.translate.translator import one_line

from .their_folders import M2M_SIZES, write_m2m, write_opus

transformers = pytest.importorskip("transformers", minversion="5")
LONGEST = 20
SEARCH = {
    "alpha": 0.0,
    "max_len_a": 0.0,
    "max_len_b": LONGEST,
    "min_len": LONGEST,
    "allow_unk": True,
    "early_stopping": False,
}
LANGUAGES = {"source_language": "en", "target_language": "de"}
OF_NLLB = {"source_language": "eng_Latn", "target_language": "deu_Latn"}


def import_(folder, form: str, out, **languages: str):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in languages.items()]
    assert main(["import", str(folder), "--format", form, "--out", str(out), *flags]) == 0
    return out


def translated(folder, lines: list[str] = LINES, beam: int = 1) -> list[str]:
    return [text.strip() for text in Translator.from_directory(folder, beam=beam, **SEARCH).translate(lines)]


def generated(model, pieces, lines: list[str], beam: int, **options):
    """Return the ids from Hugging Face's search with our length limits."""
    with torch.inference_mode():
        return model.generate(
            **pieces(lines, return_tensors="pt", padding=True), num_beams=beam, max_new_tokens=LONGEST,
            min_new_tokens=LONGEST, bad_words_ids=[[model.config.pad_token_id]], length_penalty=0.0, **options,
        )  # fmt: skip


def assert_equal(texts: list[str], theirs: list[str], beam: int = 1) -> None:
    """Compare texts, without the last token of a beam search: at the length limit we add the end token's score."""
    longest_token = 4 if beam > 1 else 0
    for text, other in zip(texts, theirs, strict=True):
        same = len(commonprefix([text, other]))  # noqa: RUF071 (characters are meant)
        assert same >= max(len(text), len(other)) - longest_token
    assert len(set(texts)) > 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each format."""
    root = tmp_path_factory.mktemp("theirs")
    for name, write in (("opus", write_opus), ("m2m", write_m2m), ("nllb", write_nllb)):
        (root / name).mkdir()
        write(root / name)
    return root


# Hugging Face's Marian


def by_marian(folder, lines=LINES, beam: int = 1) -> list[str]:
    model = transformers.MarianMTModel.from_pretrained(folder)
    pieces = transformers.MarianTokenizer.from_pretrained(folder)
    results = generated(model, pieces, lines, beam)
    return [one_line(text).strip() for text in pieces.batch_decode(results, skip_special_tokens=True)]


@pytest.mark.parametrize("beam", [1, 4])
def test_an_opus_model_translates_as_it_does_in_hugging_face(tmp_path, folders, beam):
    out = import_(folders / "opus", "marian-hf", tmp_path / "model")
    lines = [*LINES, ">>deu<< a dog"]
    texts = translated(out, lines, beam)
    assert_equal(texts, by_marian(folders / "opus", lines, beam), beam)
    assert texts[-1] != texts[0]
    model = Translator.from_directory(out).model
    with inference(model, batch_invariant=True):
        assert decoder_of(model).takes_sentences() == step_passes.usable(), "on a CPU its layers are fused"


def test_pickled_and_sharded_weights_are_read(tmp_path, folders):
    opus, pickled, folder = folders / "opus", tmp_path / "pickled", tmp_path / "shards"
    for each in (pickled, folder):
        shutil.copytree(opus, each, ignore=shutil.ignore_patterns("model.safetensors"))
    torch.save(load_file(opus / "model.safetensors"), pickled / "pytorch_model.bin")
    transformers.MarianMTModel.from_pretrained(opus).save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    whole, *others = (marian.read(each).weights for each in (opus, pickled, folder))
    for other in others:
        torch.testing.assert_close(other, whole, rtol=0, atol=0)
    shards[1].unlink()
    with pytest.raises(UserError, match=rf"{shards[1].name}: is missing, but model.safetensors.index.json lists it"):
        marian.read(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shards[1].name, f"../2/{shards[1].name}"))
    with pytest.raises(UserError, match="only files beside it are read"):
        marian.read(folder)


@pytest.mark.parametrize(("suppressed", "allowed"), [([], True), ([1], False), (None, True)])
def test_the_unknown_token_is_suppressed_by_its_id(tmp_path, folders, suppressed, allowed):
    """No file of MarianMTModel names unk_token_id: the vocabulary does."""
    shutil.copytree(folders / "opus", tmp_path / "changed")
    path = tmp_path / "changed" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "suppress_tokens": suppressed}))
    assert marian.read(tmp_path / "changed").decoding.allow_unk is allowed


def test_an_untied_output_is_read(tmp_path, folders):
    folder = tmp_path / "untied"
    shutil.copytree(folders / "opus", folder)
    model = transformers.MarianMTModel.from_pretrained(folder)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    tables = {
        f"model.{side}.embed_tokens.weight": weights["model.shared.weight"].clone() for side in ("encoder", "decoder")
    }
    save_file({**weights, **tables}, folder / "model.safetensors", {"format": "pt"})
    store(marian.read(folder), tmp_path / "ours")
    assert_equal(translated(tmp_path / "ours"), by_marian(folder))


# M2M-100 and NLLB


def write_nllb(folder):
    """Write a random model in NLLB's format: a fast tokenizer beside the SentencePiece model."""
    pieces = tokenizer().pieces(range(4, len(tokenizer())))
    rank = {piece: number for number, piece in enumerate(pieces)}
    halves = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    merges = [(one, other) for one, other in halves if one in rank and other in rank]
    vocab = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    theirs = transformers.NllbTokenizer(vocab=vocab, merges=merges, src_lang="eng_Latn", tgt_lang="deu_Latn")
    theirs.save_pretrained(folder)
    (folder / "sentencepiece.bpe.model").write_bytes(tokenizer().model)
    torch.manual_seed(3)
    config = transformers.M2M100Config(vocab_size=len(theirs), **M2M_SIZES)
    model = transformers.M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.shared.weight[len(vocab) :] *= 0.1
    model.save_pretrained(folder)


def by_m2m100(folder, beam: int = 1) -> list[str]:
    model = transformers.M2M100ForConditionalGeneration.from_pretrained(folder)
    pieces = transformers.M2M100Tokenizer.from_pretrained(folder, src_lang="en", tgt_lang="de")
    results = generated(model, pieces, LINES, beam, forced_bos_token_id=pieces.get_lang_id("de"))
    return [one_line(text.removeprefix("__de__")).strip() for text in pieces.batch_decode(results, True)]


@pytest.mark.parametrize("beam", [1, 4])
def test_m2m100_translates_as_it_does_in_hugging_face(tmp_path, folders, beam):
    out = import_(folders / "m2m", "m2m100", tmp_path / "model", **LANGUAGES)
    assert_equal(translated(out, beam=beam), by_m2m100(folders / "m2m", beam), beam)


def test_three_tables_of_m2m100_are_read(tmp_path, folders):
    """tie_word_embeddings false: source, target and output may all differ."""
    folder = tmp_path / "untied"
    shutil.copytree(folders / "m2m", folder)
    config = transformers.M2M100Config.from_pretrained(folder)
    config.tie_word_embeddings = False
    torch.manual_seed(4)
    model = transformers.M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[-108:] *= 0.1  # codes of languages
    model.save_pretrained(folder)
    store(m2m100.read(folder, **LANGUAGES), tmp_path / "ours")
    theirs = transformers.M2M100ForConditionalGeneration.from_pretrained(folder)
    tables = [theirs.model.encoder.embed_tokens, theirs.model.decoder.embed_tokens, theirs.lm_head]
    assert not any(torch.equal(tables[i].weight, tables[j].weight) for i, j in ((0, 1), (1, 2), (0, 2)))
    assert_equal(translated(tmp_path / "ours"), by_m2m100(folder))


@pytest.mark.parametrize("beam", [1, 4])
def test_nllb_translates_as_it_does_in_hugging_face(tmp_path, folders, beam):
    folder = folders / "nllb"
    out = import_(folder, "m2m100", tmp_path / "model", **OF_NLLB)
    lines = LINES[:-1]  # NLLB's tokenizer lacks the bytes of the last one
    model = transformers.M2M100ForConditionalGeneration.from_pretrained(folder)
    pieces = transformers.AutoTokenizer.from_pretrained(folder, src_lang="eng_Latn", tgt_lang="deu_Latn")
    results = generated(model, pieces, lines, beam, forced_bos_token_id=pieces.convert_tokens_to_ids("deu_Latn"))
    target = load(out).target_tokenizer  # the same SentencePiece model, which decodes bytes
    ids = {piece: number for number, piece in enumerate(target.pieces(range(len(target))))}
    theirs = [target.decode([ids[piece] for piece in pieces.convert_ids_to_tokens(row)]) for row in results]
    assert_equal(translated(out, lines, beam), [one_line(text).strip() for text in theirs], beam)


# CTranslate2


@pytest.fixture(scope="module")
def ct2(folders):
    """Opus and nllb as CTranslate2's converter writes them, and the variables of the former."""
    converters = pytest.importorskip("ctranslate2.converters")
    for name, copied in (("opus", ["source.spm", "target.spm"]), ("nllb", ["sentencepiece.bpe.model"])):
        converter = converters.TransformersConverter(str(folders / name), copy_files=copied)
        converter.convert(str(folders / f"ct2-{name}"))
    return ctranslate2_read._read_variables(folders / "ct2-opus" / "model.bin")


@pytest.mark.usefixtures("ct2")
def test_nllb_through_ctranslate2_takes_languages(tmp_path, folders):
    store(m2m100.read(folders / "nllb", **OF_NLLB), tmp_path / "whole")
    store(ctranslate2_read.read(folders / "ct2-nllb", **OF_NLLB), tmp_path / "given")
    assert translated(tmp_path / "whole", beam=4) == translated(tmp_path / "given", beam=4)


@pytest.mark.usefixtures("ct2")
@pytest.mark.parametrize(
    ("name", "read", "languages", "message"),
    [
        ("ct2-nllb", ctranslate2_read.read, {}, "none was given: give one of ace_Arab"),
        ("ct2-nllb", ctranslate2_read.read, {"source_language": "tlh"}, "tlh is unknown"),
        ("m2m", m2m100.read, LANGUAGES | {"target_language": None}, "--target-language: .* give one of af"),
        ("m2m", m2m100.read, LANGUAGES | {"target_language": "tlh"}, "--target-language: .* give one of af"),
    ],
)
def test_a_language_must_be_one_of_the_model_s(folders, name, read, languages, message):
    with pytest.raises(UserError, match=message):
        read(folders / name, **languages)


HALF, ROW, WHOLE = np.float32(0.5), np.ones(8, np.float32), np.ones((64, 32), np.int8)
LINEAR = "decoder/layer_0/ffn/linear_0"
START, BOTH = "decoder/start_from_zero_embedding", ("encoder", "decoder")
WIDER = {
    "encoder/layer_1/ffn/linear_0/bias": ROW,
    "encoder/layer_1/ffn/linear_0/weight": np.ones((8, 32), np.float32),
    "encoder/layer_1/ffn/linear_1/weight": np.ones((32, 8), np.float32),
}


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"decoder/scale_embeddings": np.float32(1.0)}, {}, "the decoder's embeddings are scaled by 1: only sqrt"),
        ({"decoder/layer_0/ffn/linear_0_noact/weight": ROW}, {}, "has the weights decoder.layer_0.ffn.linear_0_noact"),
        ({"encoder/layer_0/self_attention/relative_position_keys": ROW}, {}, "has encoder/layer_0/.*_position_keys"),
        ({"decoder/alibi": np.int8(1)}, {}, "decoder/alibi is not zero"),
        ({"encoder/num_heads": np.int16(1)}, {}, "encoder/num_heads and decoder/num_heads differ"),
        ({"encoder/position_encodings/encodings": ROW}, {}, r"encodings are \(8,\): \(positions, 32\) is needed"),
        ({"encoder/position_encodings/encodings": None}, {}, "has decoder/position_encodings/encodings but no encoder"),
        (WIDER, {}, r"encoder\.layer_1\.ffn\.linear_0\.weight is \(8, 32\), where its configuration says \(64, 32\)"),
        ({START: np.int8(0)}, {"decoder_start_token": None}, "decoder_start_token is null"),
        ({f"{side}/num_heads": np.int16(5) for side in BOTH}, {}, "32 is not a multiple of heads 5"),
        ({f"{side}/activation": np.int8(4) for side in BOTH}, {}, "activation 4 is not supported"),
        ({"encoder/newer": HALF}, {}, "has encoder/newer, which is not supported"),
        ({f"{LINEAR}/weight": WHOLE}, {}, f"has no {LINEAR}/weight_scale"),
        (
            {f"{LINEAR}/weight": WHOLE, f"{LINEAR}/weight_scale": ROW},
            {},
            r"weight_scale is \(8,\), its weight",
        ),
        ({"decoder/num_heads": np.ones(2, np.int16)}, {}, "decoder/num_heads has 2 numbers"),
        ({"decoder/embeddings/weight": ROW}, {}, r"decoder/embeddings/weight is \("),
        ({}, {"add_source_bos": True}, "config.json has add_source_bos True"),
        ({}, {"newer": "x"}, "config.json has newer 'x'"),
    ],
)
def test_unsupported_variables_and_settings_are_refused(
    tmp_path, folders, ct2, monkeypatch, changed, settings, message
):
    folder = tmp_path / "ct2"
    shutil.copytree(folders / "ct2-opus", folder)
    path, given = folder / "config.json", {name: each for name, each in (ct2 | changed).items() if each is not None}
    monkeypatch.setattr(ctranslate2_read, "_read_variables", lambda path: given)
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(UserError, match=message):
        ctranslate2_read.read(folder)
