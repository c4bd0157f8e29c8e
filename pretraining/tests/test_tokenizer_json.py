"""tokenizer.json of our vocabularies: the package tokenizers gives our ids and our text, on texts that are hard."""

import random

import pytest

from fasttfm.data.tokenizer import BOS, EOS, train_tokenizer
from fasttfm_pretraining.config.bert import BertConfig
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.data.text_tokenizer import (
    NEWLINE,
    ByteTokenizer,
    PieceTokenizer,
    load_text_tokenizer,
    train_text_tokenizer,
)
from fasttfm_pretraining.interop import bert_dirs, causal, gpt
from fasttfm_pretraining.interop.tokenizer_files import write_text_tokenizer
from fasttfm_pretraining.models.bert import BertPretraining
from fasttfm_pretraining.models.gpt import GPT

tokenizers = pytest.importorskip("tokenizers")

TEXT = [
    "a dog runs over the green grass , and two men sit in a small boat .",
    "ein Hund läuft über die grüne Wiese ; zwei Männer sitzen in einem kleinen Boot !",
    "aaaa aaa aa a baba abab hahaha ... ==== ---- 日本語 の テスト 1,000 2,000",
    "  def f(x):\n        return x  # two spaces",
] * 5
HARD = [
    "", "\n", "\n\n", " ", "   ", "  a", "a  b ", "\n a\n\n b\n", " \n \n", "a\n\n\n\nb", "▁ a▁b ▁", "\U0010fb81",
    "</s> <s><mask><pad><unk>", "<0x0A>\n<0x41>", "a" * 300, "hahahahahahahaha", "abababababab", "." * 41, "=-=-==",
    "日本語のテスト 😀👩\u200d👩\u200d👧", "é e\u0301 ﬁ Å", "\t\r\x00\x01\r\n",
    "\u00ad\u200b\ufeff x\u2028y\u0085z", "ÄÖÜß\u00a0\u3000",
]  # fmt: skip


def texts():
    drawn = random.Random(3)
    some = ["".join(drawn.choice("aab hn\n. =▁<>s/\u00e4") for _ in range(60)) for _ in range(400)]
    letters = sorted(set("".join(TEXT)))
    return [*HARD, *TEXT[:4], *some, *("".join(drawn.choice(letters) for _ in range(80)) for _ in range(200))]


def without_bytes():
    return PieceTokenizer(train_tokenizer(TEXT, vocab_size=150, byte_fallback=False, symbols=[NEWLINE]))


TOKENIZERS = {
    "pieces": lambda: train_text_tokenizer(TEXT, 420),
    "no merges": lambda: train_text_tokenizer(TEXT, 345),
    "spaces joined": lambda: PieceTokenizer(train_tokenizer(TEXT, vocab_size=400)),
    "no bytes": without_bytes,
    "bytes": ByteTokenizer,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_and_texts_are_ours(tmp_path, name):
    ours = TOKENIZERS[name]()
    assert not write_text_tokenizer(ours, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.get_vocab_size() == len(ours)
    for text in texts():
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False).ids == ids, text
        if name != "no bytes":  # where SentencePiece shows what is unknown in a way of its own
            assert theirs.decode(ids) == ours.decode(ids), text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_type": "unigram"}, "is no BPE"),
        ({"normalization": "nfkc"}, "normalizes text"),
        ({"symbols": ["<2de>"]}, "'<2de>' is never cut"),  # SentencePiece puts no spaces around it, tokenizers does
    ],
)
def test_what_cannot_be_written_is_told(tmp_path, options, said):
    ours = PieceTokenizer(train_tokenizer(TEXT, vocab_size=330, **options))
    (line,) = write_text_tokenizer(ours, tmp_path)
    assert said in line
    assert [path.name for path in tmp_path.iterdir()] == ["spm.model"]


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@pytest.mark.parametrize("name", ["pieces", "bytes"])
def test_an_exported_model_is_used_by_name_and_comes_back(tmp_path, name, kind):
    transformers = pytest.importorskip("transformers")
    ours = TOKENIZERS[name]()
    sizes = {"vocab_size": len(ours), "d_model": 16, "heads": 2, "d_ff": 64, "layers": 1, "max_length": 512}
    if kind == "gpt":
        assert not gpt.write(GPT(GPTConfig(**sizes)), tmp_path / "theirs", ours)
    else:
        assert not bert_dirs.export_folder(BertPretraining(BertConfig(**sizes)), tmp_path / "theirs", ours)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    begin, end = ([BOS], [EOS]) if kind == "bert" else ([], [])
    for text in HARD:
        assert tokenizer(text)["input_ids"] == [*begin, *ours.encode(text), *end], text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS, 0)
    if kind == "bert":
        pair, ids = tokenizer("a dog", "two men"), [ours.encode(text) for text in ("a dog", "two men")]
        assert pair["input_ids"] == [BOS, *ids[0], EOS, *ids[1], EOS]
        assert pair["token_type_ids"] == [0] * (len(ids[0]) + 2) + [1] * (len(ids[1]) + 1)
        assert tokenizer.mask_token_id == ours.mask
    (causal if kind == "gpt" else bert_dirs).import_folder(tmp_path / "theirs", tmp_path / "back")
    back = load_text_tokenizer(tmp_path / "back")
    assert type(back) is type(ours)
    assert back.encode(TEXT[3]) == ours.encode(TEXT[3])
