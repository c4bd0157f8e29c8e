"""Trained heads of Hugging Face's folders come in, and ours go out: equal scores both ways, for every task."""

import json

import pytest
import torch

from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer
from fasttfm_pretraining.interop import heads
from fasttfm_pretraining.training.task_prediction import FineTuned

transformers = pytest.importorskip("transformers")

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", ".", "the", "cat", "##s", "sat"]
BERT = {
    "vocab_size": len(PIECES), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "initializer_range": 0.4,
}  # fmt: skip
CONFIGS = {
    "Bert": (transformers.BertConfig, BERT),
    "Albert": (transformers.AlbertConfig, BERT | {"embedding_size": 8}),
    "Electra": (transformers.ElectraConfig, BERT | {"embedding_size": 8}),
    "Roberta": (transformers.RobertaConfig, BERT | {"type_vocab_size": 1, "pad_token_id": 0}),
    "DistilBert": (
        transformers.DistilBertConfig,
        {"vocab_size": len(PIECES), "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "initializer_range": 0.4},
    ),
}
NAMES = {"id2label": {0: "cold", 1: "mild", 2: "warm"}, "label2id": {"cold": 0, "mild": 1, "warm": 2}}
LENGTHS = torch.tensor([9, 5, 7, 8])


def saved(family, head, folder, **changes):
    """A model with random weights and word pieces."""
    torch.manual_seed(0)
    config, sizes = CONFIGS[family]
    model = getattr(transformers, family + head)(config(**{**sizes, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return model.eval()


def rows():
    """Tokens, segments, mask."""
    torch.manual_seed(1)
    tokens, mask = torch.randint(5, len(PIECES), (4, 9)), torch.arange(9) < LENGTHS[:, None]
    return tokens.masked_fill(~mask, 0), (torch.arange(9) >= 4).long().expand(4, 9).contiguous(), mask


def scores(model, tokens, segments):
    """Ours: (rows, length, 2) of answers, (rows, classes)."""
    hidden = model.body(tokens, segments, LENGTHS)
    return model.span(hidden) if hasattr(model, "span") else model.classifier(model.body.pooled(hidden))


def their_scores(model, tokens, segments, mask):
    has_segments = type(model).__name__.startswith(("Bert", "Albert", "Electra"))
    inputs = {"input_ids": tokens, "attention_mask": mask.long()} | (
        {"token_type_ids": segments} if has_segments else {}
    )
    if "MultipleChoice" in type(model).__name__:  # two examples of two choices
        return model(**{name: each.view(2, 2, -1) for name, each in inputs.items()}).logits.view(4, 1)
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else torch.stack([out.start_logits, out.end_logits], -1)


@pytest.mark.parametrize("head", ["ForQuestionAnswering", "ForSequenceClassification", "ForMultipleChoice"])
@pytest.mark.parametrize("family", ["Bert", "Albert", "Electra", "Roberta", "DistilBert"])
def test_a_head_comes_in_and_goes_out_with_its_scores(family, head, tmp_path):
    (tmp_path / "H").mkdir()
    theirs = saved(family, head, tmp_path / "H", **(NAMES if "Sequence" in head else {}))
    if family in ("Electra", "DistilBert") and head != "ForQuestionAnswering":
        with pytest.raises(UserError, match=f"the head of {family}{head} is not supported"):
            heads.read(tmp_path / "H")
        return
    trained, _ = heads.import_folder(tmp_path / "H", tmp_path / "M")
    tokens, segments, mask = rows()
    expected = their_scores(theirs, tokens, segments, mask)
    where = mask if head == "ForQuestionAnswering" else ...
    torch.testing.assert_close(scores(trained.model, tokens, segments)[where], expected[where], rtol=1e-5, atol=1e-5)
    model = FineTuned.load(tmp_path / "M")
    if trained.task == "classify":
        assert model.labels == ["cold", "mild", "warm"]
    name, _ = heads.export_folder(trained, tmp_path / "B", load_text_tokenizer(tmp_path / "M"))
    repeated, told = getattr(transformers, name).from_pretrained(tmp_path / "B", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    again = their_scores(repeated.eval(), tokens, segments, mask)
    torch.testing.assert_close(again[where], expected[where], rtol=1e-5, atol=1e-5)
    if trained.task == "classify":
        assert repeated.config.id2label == NAMES["id2label"]
    assert torch.equal(
        scores(heads.read(tmp_path / "B").model, tokens, segments), scores(trained.model, tokens, segments)
    )


def test_an_electra_with_a_classifier_goes_out_as_the_albert_that_computes_the_same(tmp_path):
    from fasttfm_pretraining.config.bert import BertClassifierConfig
    from fasttfm_pretraining.models.heads import Classifier

    torch.manual_seed(2)
    sizes = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "embedding_size": 8, "max_length": 64}
    config = BertClassifierConfig(vocab_size=len(PIECES), sentence_head=False, init_std=0.4, labels=3, **sizes)
    trained = heads.Trained("classify", Classifier(config).eval(), ["cold", "mild", "warm"])
    saved("Bert", "Model", (tmp_path / "T").absolute().parent)
    tokenizer = heads.read_tokenizer(tmp_path)
    assert heads.export_folder(trained, tmp_path / "B", tokenizer)[0] == "AlbertForSequenceClassification"
    repeated = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "B").eval()
    tokens, segments, mask = rows()
    expected = scores(trained.model, tokens, segments)
    torch.testing.assert_close(their_scores(repeated, tokens, segments, mask), expected, rtol=1e-5, atol=1e-5)


def test_whether_a_model_abstains_goes_out_and_comes_back(tmp_path):
    (tmp_path / "H").mkdir()
    saved("Bert", "ForQuestionAnswering", tmp_path / "H")
    asked = {"id": "q", "question": "the cat", "answers": []}
    paragraphs = [{"context": "the cats sat. the cat sat.", "qas": [asked]}]
    (tmp_path / "q.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    assert main(["finetune", "import", str(tmp_path / "H"), "--out", str(tmp_path / "one")]) == 0
    assert main(["finetune", "import", str(tmp_path / "H"), "--out", str(tmp_path / "two"), "--abstains"]) == 0
    assert main(["finetune", "export", str(tmp_path / "two"), "--out", str(tmp_path / "B")]) == 0
    assert main(["finetune", "import", str(tmp_path / "B"), "--out", str(tmp_path / "three")]) == 0
    assert [FineTuned.load(tmp_path / name).abstains for name in ("one", "two", "three")] == [False, True, True]
    answers = []
    for name in ("one", "two", "three"):
        out = tmp_path / f"{name}.json"
        asking = ["finetune", "predict", str(tmp_path / name), str(tmp_path / "q.json"), "--out", str(out)]
        assert main([*asking, "--device", "cpu"]) == 0
        answers.append(json.loads(out.read_text())["q"])
    assert answers[0]
    assert answers[1] == answers[2]
    again = ["--train", str(tmp_path / "t.tsv"), "--valid", str(tmp_path / "t.tsv"), "--out", str(tmp_path / "C")]
    (tmp_path / "t.tsv").write_text("a\tlabel\nthe cat\t1\nsat\t0\n" * 4)
    quick = ["--row-length", "32", "--max-tokens", "64", "--max-update", "1", "--threads", "1", "--no-tensorboard"]
    body = ["finetune", "classify", "--init-from", str(tmp_path / "one"), "--device", "cpu"]
    assert main([*body, *again, *quick]) == 0  # to be trained on, as a body


@pytest.mark.parametrize(
    ("head", "changes", "said"),
    [
        ("Model", {}, "without a task's head"),
        ("ForSequenceClassification", {"problem_type": "regression"}, "problem_type regression"),
        ("ForSequenceClassification", {"num_labels": 1}, "with 1 labels"),
        ("ForTokenClassification", {}, "BertForTokenClassification, without"),
    ],
)
def test_what_is_no_head_of_ours_ends_in_one_line(head, changes, said, tmp_path):
    saved("Bert", head, tmp_path, **changes)
    with pytest.raises(UserError, match=said):
        heads.read(tmp_path)


def test_weights_besides_the_head_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    saved("Bert", "ForQuestionAnswering", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"adapter.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"adapter\.weight"):
        heads.read(tmp_path)


def test_pre_training_s_import_says_that_it_leaves_a_head_out(tmp_path, capsys):
    (tmp_path / "H").mkdir()
    saved("Bert", "ForQuestionAnswering", tmp_path / "H")
    assert main(["mlm", "import", str(tmp_path / "H"), "--out", str(tmp_path / "M")]) == 0
    assert "the trained head of BertForQuestionAnswering: fasttfm finetune import keeps it" in capsys.readouterr().out
