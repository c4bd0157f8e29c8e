"""Tokenizers of Hugging Face folders: those made of older files cut every text as transformers does."""

import json

import pytest
from their_models import saved

from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm_pretraining.data.task_inputs import join
from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer
from fasttfm_pretraining.interop.tokenizer_files import read_tokenizer
from fasttfm_pretraining.training.finetuning import markers_of

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

HARD = ("The cat's mats, 1234!", " two  spaces\n\nlines ", "\u00dcber na\u00efve \u6771\u4eac", "x<mask> <unk>", "")
TEXT = ["the cat sat on the mat", "a cat's mat, on which the cats sat", "That is 12 of 1234 mats!"] * 20


def trained(made, folder, **options):
    """How many tokens it has learned of TEXT and written into the folder."""
    made.train_from_iterator(TEXT, tokenizers.trainers.BpeTrainer(**options, show_progress=False))
    made.model.save(str(folder))
    return made.get_vocab_size()


def byte_level_files(folder, special):
    """vocab.json and merges.txt as the library's trainer and its model write them."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return trained(made, folder, vocab_size=300, special_tokens=special, initial_alphabet=alphabet)


def word_end_files(folder):
    """The same of GPT-1's kind."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return trained(made, folder, vocab_size=90, special_tokens=["<unk>"], end_of_word_suffix="</w>")


@pytest.mark.parametrize(
    ("kind", "special", "name"),
    [
        ("gpt2", ["<|endoftext|>"], "GPT2Tokenizer"),
        ("roberta", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "RobertaTokenizer"),
        ("openai-gpt", [], "OpenAIGPTTokenizer"),
    ],
)
def test_vocab_json_with_merges_is_read_as_transformers_reads_it(tmp_path, kind, special, name):
    (word_end_files if kind == "openai-gpt" else lambda folder: byte_level_files(folder, special))(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    ours = read_tokenizer(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    for text in HARD:
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    theirs.save_pretrained(tmp_path / "saved")
    again = read_tokenizer(tmp_path / "saved")
    assert [again.encode(text) for text in HARD] == [ours.encode(text) for text in HARD]
    assert again.separators == ours.separators == (2 if kind == "roberta" else 1)


@pytest.mark.parametrize(
    "settings", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
def test_word_pieces_are_cut_as_tokenizer_config_says(tmp_path, settings):
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] the The cat ##s u \u00fc \u6771 \u4eac \u6771\u4eac xyz ##\u4eac ##ber"
    (tmp_path / "vocab.txt").write_text(pieces.replace(" ", "\n") + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "added_tokens.json").write_text('{"newword": 17, "other": 18}')
    ours = read_tokenizer(tmp_path)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path, **settings)
    for text in ("The cats", "\u00fcber \u6771\u4eac", "the newword", "u\u0308ber"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, text
    (tmp_path / "added_tokens.json").write_text('{"newword": 20}')
    with pytest.raises(UserError, match=r"added_tokens\.json: 'newword' has the number 20"):
        read_tokenizer(tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["gpt2", "openai-gpt"])
def test_a_folder_without_tokenizer_json_becomes_a_model_that_writes(tmp_path, kind, capsys):
    """A padded vocabulary, too: from import to training."""
    folder, out, data = (tmp_path / name for name in "HMD")
    folder.mkdir()
    size = byte_level_files(folder, ["<|endoftext|>"]) if kind == "gpt2" else word_end_files(folder)
    name = {"gpt2": "GPT2LMHeadModel", "openai-gpt": "OpenAIGPTLMHeadModel"}[kind]
    saved(name, folder, vocab_size=size + 20, n_positions=32, n_layer=2)
    assert main(["lm", "import", str(folder), "--out", str(out)]) == 0
    assert "left out 20 rows" in capsys.readouterr().out
    assert main(["lm", "generate", str(out), "--prompt", "the cat", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    (tmp_path / "a.txt").write_text("\n".join(TEXT) + "\n")
    spm = str(out / "tokenizer.json")
    assert main(["lm", "prepare", "--text", str(tmp_path / "a.txt"), "--spm", spm, "--out", str(data)]) == 0
    sizes = ["--d-model", "16", "--heads", "2", "--d-ff", "64", "--layers", "2", "--max-length", "32"]
    if kind == "openai-gpt":
        sizes += ["--no-norm-first"]
    quick = ["--max-tokens", "128", "--warmup-updates", "1", "--max-update", "2", "--threads", "1", "--no-tensorboard"]
    train = ["lm", "train", "--preset", "gpt-tiny", "--data", str(data), "--init-from", str(out)]
    assert main([*train, "--out", str(tmp_path / "N"), "--row-length", "32", *sizes, *quick, "--device", "cpu"]) == 0


def test_what_is_missing_or_damaged_ends_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"has neither tokenizer\.json nor vocab\.txt nor vocab\.json with merges\.txt"):
        read_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(UserError, match=r"vocab\.json without merges\.txt"):
        read_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"config\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"vocab\.json: is damaged"):
        read_tokenizer(tmp_path)


def test_a_roberta_of_older_files_is_imported_and_its_pairs_are_joined_as_there(tmp_path):
    folder = tmp_path / "H"
    folder.mkdir()
    size = byte_level_files(folder, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    saved("RobertaForMaskedLM", folder, vocab_size=size, max_position_embeddings=66)
    assert main(["mlm", "import", str(folder), "--out", str(tmp_path / "M")]) == 0
    tokenizer, theirs = load_text_tokenizer(tmp_path / "M"), transformers.AutoTokenizer.from_pretrained(folder)
    markers = markers_of("squad", tokenizer)
    for pair in (("the cat",), ("the cat", "on the mat")):
        row = join(markers, *[tokenizer.encode(text) for text in pair], *([None] if len(pair) == 1 else []), 64)
        assert row.tokens.tolist() == theirs(*pair).input_ids
    short = join(markers, tokenizer.encode("the cat sat"), tokenizer.encode("on the mats"), 9)
    assert len(short.tokens) == 9
