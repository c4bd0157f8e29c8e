"""Trained heads of Hugging Face's folders come in, and ours go out: equal scores both ways, for every task."""

import json

import numpy as np
import pytest
import torch
from their_models import assert_same_gradients
from their_models import saved as saved_model

from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm_pretraining.config.bert import BertClassifierConfig
from fasttfm_pretraining.data.task_batches import Examples
from fasttfm_pretraining.data.task_inputs import Row
from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer
from fasttfm_pretraining.interop import heads
from fasttfm_pretraining.models.heads import Classifier
from fasttfm_pretraining.training.task_prediction import FineTuned

transformers = pytest.importorskip("transformers")

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", ".", "the", "cat", "##s", "sat"]
NAMES = {"id2label": {0: "cold", 1: "mild", 2: "warm"}, "label2id": {"cold": 0, "mild": 1, "warm": 2}}


def saved(name, folder, **changes):
    """A model with random weights and word pieces."""
    changes = {"vocab_size": len(PIECES), "max_position_embeddings": 64, "initializer_range": 0.4, **changes}
    model = saved_model(name, folder, **(changes | ({"pad_token_id": 0} if name.startswith("Roberta") else {})))
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return model


def batch_of(head):
    """Rows of several lengths, of answers of one length: theirs lets padding be an answer."""
    draw = np.random.default_rng(1)
    lengths = (9, 9, 9, 9) if head == "ForQuestionAnswering" else (9, 5, 7, 8)
    rows = [Row(draw.integers(5, len(PIECES), length), 4) for length in lengths]
    if head == "ForMultipleChoice":  # two examples of two choices
        return Examples([rows[:2], rows[2:]], np.array([1, 0])).batch(range(2))
    labels = [[4, 5], [0, 0], [8, 8], [3, 6]] if head == "ForQuestionAnswering" else [0, 2, 1, 1]
    return Examples([[row] for row in rows], np.array(labels)).batch(range(4))


def their_output(model, batch):
    """Their loss and scores of a batch."""
    name = type(model).__name__
    inputs = {"input_ids": batch.tokens, "attention_mask": torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]}
    inputs["attention_mask"] = inputs["attention_mask"].long()
    if name.startswith(("Bert", "Albert", "Electra")):
        inputs["token_type_ids"] = batch.segments
    if "QuestionAnswering" in name:
        out = model(**inputs, start_positions=batch.labels[:, 0], end_positions=batch.labels[:, 1])
        return out.loss, torch.stack([out.start_logits, out.end_logits])
    if "MultipleChoice" in name:
        inputs = {key: each.view(2, 2, -1) for key, each in inputs.items()}
    out = model(**inputs, labels=batch.labels)
    return out.loss, out.logits


@pytest.mark.parametrize("head", ["ForQuestionAnswering", "ForSequenceClassification", "ForMultipleChoice"])
@pytest.mark.parametrize("family", ["Bert", "Albert", "Electra", "Roberta", "DistilBert"])
def test_a_head_comes_in_and_goes_out_with_its_scores_and_has_their_loss_and_gradients(family, head, tmp_path):
    (tmp_path / "H").mkdir()
    theirs = saved(family + head, tmp_path / "H", **(NAMES if "Sequence" in head else {}))
    if family in ("Electra", "DistilBert") and head != "ForQuestionAnswering":
        with pytest.raises(UserError, match=f"the head of {family}{head} is not supported"):
            heads.read(tmp_path / "H")
        return
    trained, _ = heads.import_folder(tmp_path / "H", tmp_path / "M")
    batch, ours = batch_of(head), trained.model
    expected, their_scores = their_output(theirs, batch)
    loss, nll = ours.batch_loss(batch)
    assert nll.item() == pytest.approx(loss.item())
    torch.testing.assert_close(loss / len(batch), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(batch), their_scores, rtol=1e-5, atol=1e-5)

    name, _ = heads.export_folder(trained, tmp_path / "B", load_text_tokenizer(tmp_path / "M"))
    repeated, told = getattr(transformers, name).from_pretrained(tmp_path / "B", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    torch.testing.assert_close(their_output(repeated.eval(), batch)[1], their_scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(heads.read(tmp_path / "B").model(batch), ours(batch))
    if trained.task == "classify":
        assert FineTuned.load(tmp_path / "M").labels == ["cold", "mild", "warm"]
        assert repeated.config.id2label == NAMES["id2label"]
    (loss / len(batch)).backward()
    expected.backward()
    ignored = "segment" if family in ("Roberta", "DistilBert") else "nothing"  # one of theirs is both of ours
    assert_same_gradients(
        ours, theirs, lambda folder: heads.read(folder).model, tmp_path / "G", rtol=1e-4, ignored=ignored
    )


def test_an_electra_with_a_classifier_goes_out_as_the_albert_that_computes_the_same(tmp_path):
    torch.manual_seed(2)
    sizes = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "embedding_size": 8, "max_length": 64}
    config = BertClassifierConfig(vocab_size=len(PIECES), sentence_head=False, init_std=0.4, labels=3, **sizes)
    trained = heads.Trained("classify", Classifier(config).eval(), ["cold", "mild", "warm"])
    saved("BertModel", tmp_path)
    tokenizer = heads.read_tokenizer(tmp_path)
    assert heads.export_folder(trained, tmp_path / "B", tokenizer)[0] == "AlbertForSequenceClassification"
    repeated = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "B").eval()
    batch = batch_of("ForSequenceClassification")
    torch.testing.assert_close(their_output(repeated, batch)[1], trained.model(batch), rtol=1e-5, atol=1e-5)


def test_whether_a_model_abstains_goes_out_and_comes_back(tmp_path):
    (tmp_path / "H").mkdir()
    saved("BertForQuestionAnswering", tmp_path / "H")
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
    saved(f"Bert{head}", tmp_path, **changes)
    with pytest.raises(UserError, match=said):
        heads.read(tmp_path)


def test_pre_training_s_import_says_that_it_leaves_a_head_out(tmp_path, capsys):
    (tmp_path / "H").mkdir()
    saved("BertForQuestionAnswering", tmp_path / "H")
    assert main(["mlm", "import", str(tmp_path / "H"), "--out", str(tmp_path / "M")]) == 0
    told = capsys.readouterr().out
    assert "the trained head of BertForQuestionAnswering: fasttfm finetune import keeps it" in told
    assert "has no head of masked tokens: this model's begins with fresh weights" in told
    assert "left out the weights qa_outputs.bias and 1 other" in told
