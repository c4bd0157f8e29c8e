"""fasttfm mlm from text to a Hugging Face folder and back, and one line for what cannot be."""

import json

import pytest
import torch

from fasttfm.cli.main import main
from fasttfm_pretraining.models.kinds import read_model

WORDS = "the dog runs over a green field and two men sit in small boats under blue skies".split()  # noqa: SIM905
TINY = [
    "--d-model", "16", "--heads", "2", "--d-ff", "24", "--layers", "2", "--max-length", "32", "--row-length", "32",
    "--max-tokens", "256", "--max-update", "2", "--log-interval", "1", "--no-tensorboard", "--precision", "fp32",
    "--warmup-updates", "0", "--workers", "1", "--device", "cpu",
]  # fmt: skip


@pytest.fixture
def data(tmp_path):
    text = "\n".join(" ".join(WORDS[(n + k) % len(WORDS)] for k in range(9)) for n in range(150))
    (tmp_path / "text.txt").write_text(text + "\n")
    prepare = ["mlm", "prepare", "--text", str(tmp_path / "text.txt"), "--bytes", "--out", str(tmp_path / "D")]
    assert main([*prepare, "--valid-share", "0.2"]) == 0
    return tmp_path / "D"


@pytest.mark.sample(1)
@pytest.mark.parametrize("preset", ["bert-tiny", "albert-tiny", "electra-tiny"])
def test_from_text_to_hugging_face_and_back(preset, data, tmp_path, capsys):
    model, folder, repeated = (str(tmp_path / name) for name in ("M", "H", "A"))
    assert main(["mlm", "train", "--preset", preset, "--data", str(data), "--out", model, *TINY]) == 0
    assert (tmp_path / "M" / "curve.png").exists()
    assert main(["mlm", "evaluate", model, "--data", str(data), "--device", "cpu"]) == 0
    assert "held-out loss" in capsys.readouterr().out
    picture = str(tmp_path / "attention.png")
    assert main(["mlm", "attention", model, "the dog runs", "--layers", "2", "--out", picture]) == 0
    assert (tmp_path / "attention.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["mlm", "attention", model, "a" * 31, "--out", picture]) == 2
    assert "has 31 tokens, at most 30 can be shown" in capsys.readouterr().err
    assert main(["mlm", "export", model, "--out", folder]) == 0
    source = [folder]
    if preset == "electra-tiny":
        source = [f"{folder}/discriminator", "--generator", f"{folder}/generator"]
    assert main(["mlm", "import", *source, "--out", repeated]) == 0
    one, other = (read_model("mlm", tmp_path / name) for name in ("M", "A"))
    for (name, tensor), parameter in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(tensor, parameter), name
    assert main(["mlm", "evaluate", repeated, "--data", str(data), "--device", "cpu"]) == 0


def test_a_wordpiece_vocabulary_comes_along(tmp_path, capsys):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2}
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "the", "do", "##g", "##s"]
    folder = tmp_path / "H"
    transformers.BertForPreTraining(transformers.BertConfig(vocab_size=len(pieces), **sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    assert main(["mlm", "import", str(folder), "--out", str(tmp_path / "M")]) == 0
    (tmp_path / "text.txt").write_text("The dogs\n" * 200)
    files = ["--text", str(tmp_path / "text.txt"), "--spm", str(tmp_path / "M" / "tokenizer.json")]
    assert main(["mlm", "prepare", *files, "--out", str(tmp_path / "D")]) == 0
    assert main(["mlm", "evaluate", str(tmp_path / "M"), "--data", str(tmp_path / "D"), "--device", "cpu"]) == 0
    assert "pairs" in capsys.readouterr().out
    from fasttfm_pretraining.data.masking_vocabulary import masking_vocabulary
    from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer

    vocabulary = masking_vocabulary(load_text_tokenizer(tmp_path / "M"))
    assert (vocabulary.begin, vocabulary.end, vocabulary.mask) == (2, 3, 4)
    assert vocabulary.begins_word.tolist() == [True] * (len(pieces) - 2) + [False] * 2
    assert tokenizers.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "--preset is missing: there are albert-base"),
        (["train", "--preset", "bert-tin"], "preset 'bert-tin' is unknown"),
        (["train", "--preset", "bert-tiny", "--generator-size", "0.5"], "--generator-size belongs to a model of kind"),
        (["train", "--preset", "bert-tiny", "--objective", "mmm"], "--objective: 'mmm' must be one of mlm,"),
        (["train", "--preset", "bert-tiny", "--out", "M"], "--data is missing: fasttfm mlm train"),
        (["evaluate", "M", "--data", "D"], "M: is not a model directory"),
        (["import", "H", "--out", "M"], "H/config.json: is missing"),
    ],
)
def test_what_cannot_be_ends_in_one_line(arguments, message, tmp_path, monkeypatch, refusal_of):
    monkeypatch.chdir(tmp_path)
    assert message in refusal_of(["mlm", *arguments])


def test_a_wrong_folder_ends_in_one_line(tmp_path, refusal_of):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    words = ["mlm", "import", tmp_path, "--generator", "G", "--out", tmp_path / "M"]
    assert "--generator belongs to an ELECTRA" in refusal_of(words)
