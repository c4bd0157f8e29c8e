"""Pre-training of encoders: the loss of Hugging Face's models update by update, exact resume, fixed validation."""

import dataclasses

import numpy as np
import pytest
import torch
from their_models import saved, saved_electra
from training.runs import assert_same_weights

from fasttfm.config import gather
from fasttfm.config.training import TrainingConfig
from fasttfm.errors import UserError
from fasttfm.training.run import train
from fasttfm.training.updates import Updates
from fasttfm_pretraining.config.data import DocumentOptions, MaskingConfig
from fasttfm_pretraining.data.documents import PreparedDocuments
from fasttfm_pretraining.data.prepare_documents import prepare_documents
from fasttfm_pretraining.interop import bert as interop
from fasttfm_pretraining.models import electra
from fasttfm_pretraining.models.kinds import read_body
from fasttfm_pretraining.training.masked_modelling import MaskedModelling, evaluate, masked_batches

CPU = torch.device("cpu")
SIZES = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "max_length": 32}
RUN = {
    **SIZES, "row_length": 32, "max_tokens": 256, "dropout": 0.1, "optimizer": "adamw", "schedule": "constant",
    "warmup_updates": 0, "lr": 1e-3, "label_smoothing": 0.0, "valid_interval_updates": 3, "save_interval_updates": 3,
    "log_interval": 1, "tensorboard": False, "threads": 1,
}  # fmt: skip
FIFTY = TrainingConfig(
    optimizer="adamw", schedule="constant", warmup_updates=0, lr=2e-3, adam_betas=(0.9, 0.999), adam_eps=1e-8,
    weight_decay=0.01, label_smoothing=0.0, max_update=50,
)  # fmt: skip
WORDS = "the a dog cat runs sits under over green small house boat two men blue sky and then it".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of made-up sentences, in bytes."""
    folder = tmp_path_factory.mktemp("documents")
    lines = [" ".join(WORDS[(n * k + k * k) % len(WORDS)] for k in range(1, 7)) for n in range(120)]
    text = "\n\n".join("\n".join(lines[n : n + 6]) for n in range(0, 120, 6))
    (folder / "text.txt").write_text(text + "\n")
    options = DocumentOptions(vocabulary="bytes", document_separator="", valid_share=0.2)
    prepare_documents([folder / "text.txt"], folder / "D", options, say=lambda line: None)
    return folder / "D"


def values(kind, **changes):
    return gather(overrides={**RUN, **changes}, kind=kind)


THEIRS = {"vocab_size": 261, "num_hidden_layers": 2, "max_position_embeddings": 32, "initializer_range": 0.1}


def bert_and_theirs(folder, objective):
    """Ours, their parameters and their loss of a batch."""
    if objective == "mlm+nsp":
        model, sentence = saved("BertForPreTraining", folder, **THEIRS), "next_sentence_label"
    else:
        model = saved("AlbertForPreTraining", folder, **THEIRS, classifier_dropout_prob=0.0)
        sentence = "sentence_order_label"

    def loss_of(batch, mask, labels):
        return model(batch.tokens, mask, batch.segments, labels=labels, **{sentence: batch.sentence_labels}).loss

    return interop.read_pretraining(folder), model.parameters(), loss_of


def electra_and_theirs(folder, monkeypatch):
    """The words that the generator draws are handed over: chance decides between two of like probability."""
    drawn, sample = [], electra.sample
    monkeypatch.setattr(electra, "sample", lambda masked: drawn.append(sample(masked)) or drawn[-1])
    discriminator, generator = saved_electra(folder, **THEIRS)

    def loss_of(batch, mask, labels):
        seen, is_replaced = batch.tokens.clone(), torch.zeros_like(mask)
        seen.view(-1)[batch.positions] = drawn[-1]
        is_replaced.view(-1)[batch.positions] = (drawn[-1] != batch.labels).long()
        filled = generator(batch.tokens, mask, batch.segments, labels=labels).loss
        return filled + 50 * discriminator(seen, mask, batch.segments, labels=is_replaced).loss

    parameters = dict.fromkeys([*discriminator.parameters(), *generator.parameters()])
    return interop.read_electra(folder / "d", folder / "g"), parameters, loss_of


@pytest.mark.sample(2)
@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm+sop", "electra"])
def test_fifty_updates_are_those_of_hugging_face_and_plain_torch(objective, data, tmp_path, monkeypatch):
    """Fifty losses of ours are those of a plain loop over their parameters."""
    pytest.importorskip("transformers")
    is_electra = objective == "electra"
    ours, parameters, loss_of = (
        electra_and_theirs(tmp_path, monkeypatch) if is_electra else bert_and_theirs(tmp_path, objective)
    )
    documents = PreparedDocuments.open(data)
    config = MaskingConfig(objective=objective, row_length=32, max_tokens=256)
    batches = masked_batches(config, documents.train, documents.tokenizer, 1)
    updates = Updates(ours.train(), batches, FIFTY, CPU)
    optimizer = torch.optim.AdamW(parameters, 2e-3, (0.9, 0.999), 1e-8, 0.01)
    order = [(epoch, indices) for epoch in range(9) for indices in batches.epoch(epoch)]
    losses = []
    for epoch, indices in order[:50]:
        updates.forget_sums()
        assert updates.perform()
        mine = float(updates.totals[0]) / updates.sums.target_tokens

        batch = batches.batch(indices, epoch)
        labels = torch.full(batch.tokens.shape, -100)
        labels.view(-1)[batch.positions] = batch.labels
        mask = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
        loss = loss_of(batch, mask, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert mine == pytest.approx(float(loss.detach()), rel=2e-5)
        losses.append(mine)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bert", {}),
        ("bert", {"objective": "mlm", "whole_words": True, "packed": True}),
        ("albert", {"embedding_size": 8, "share": "attention", "dropout": 0.1}),
        ("electra", {"embedding_size": 8, "generator_size": 0.5}),
    ],
)
def test_a_run_that_stops_and_goes_on_ends_in_the_same_bits(kind, changes, data, tmp_path):
    task = MaskedModelling(kind)
    whole = train(values(kind, max_update=6, **changes), data, tmp_path / "whole", CPU, task=task)
    train(values(kind, max_update=3, **changes), data, tmp_path / "parts", CPU, task=task)
    parts = train(values(kind, max_update=6, **changes), data, tmp_path / "parts", CPU, task=task)
    assert parts.score == whole.score
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    repeated = evaluate(tmp_path / "whole", data, "last", CPU)
    assert repeated == whole.score
    record = repeated.record()
    assert ("sentence_accuracy" in record) == (changes.get("objective") != "mlm" and kind != "electra")
    assert ("detection_accuracy" in record) == (kind == "electra")
    body = read_body(tmp_path / "whole")
    assert body(torch.ones(1, 5, dtype=torch.int64)).shape == (1, 5, 16)


def test_packed_rows_have_the_loss_of_padded_ones(data):
    documents = PreparedDocuments.open(data)
    for kind, objective in (("bert", "mlm+nsp"), ("electra", "electra")):
        config = MaskedModelling(kind).build(values(kind, objective=objective, dropout=0.0), documents)
        model = MaskedModelling(kind).model(config.model).eval()
        batches = masked_batches(config.data, documents.train, documents.tokenizer)
        batch = max(
            (batches.batch(indices) for indices in batches.in_order()),
            key=lambda each: int(each.lengths.max() - each.lengths.min()),
        )
        assert batch.lengths.min() < batch.lengths.max()
        losses = []
        for packed in (False, True):
            torch.manual_seed(0)
            losses.append(model.batch_loss(batch, packed=packed)[0])
        torch.testing.assert_close(*losses)


def test_pairs_of_bytes_are_cut_where_a_line_begins(data):
    documents = PreparedDocuments.open(data)
    config = MaskingConfig(objective="mlm+nsp", row_length=96)
    made = masked_batches(config, documents.train, documents.tokenizer)
    whole = np.flatnonzero(
        made.spans.ends - made.spans.begins == 93
    )  # shorter ones may have no line break in the middle
    assert len(whole) > 9
    for number in whole:
        row, second, _ = made.row(number, np.random.default_rng(number))
        assert row[second - 2 : second].tolist() == [5 + ord("\n"), 3]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"objective": "electra"}, "not for a model of kind bert: give --preset electra"),
        ("electra", {"objective": "mlm"}, "not for a model of kind electra: give --preset bert-tiny or albert-tiny"),
        ("bert", {"row_length": 64}, "--row-length 64: the model has 32 positions"),
        ("bert", {"objective": "mlm", "sentence_head": True}, "do not go together"),
        ("bert", {"phrases": "no-such-file.txt"}, "--phrases no-such-file.txt: no such file"),
        ("bert", {"mask_rate": 1.0}, "--mask-rate 1.0 must lie between 0 and 1"),
    ],
)
def test_what_does_not_fit_ends_in_one_line(kind, changes, message, data, tmp_path):
    with pytest.raises(UserError, match=message) as raised:
        train(values(kind, max_update=1, **changes), data, tmp_path / "M", CPU, task=MaskedModelling(kind))
    assert "\n" not in str(raised.value)


def test_a_vocabulary_without_a_mask_is_refused(data, tmp_path, monkeypatch):
    documents = PreparedDocuments.open(data)
    monkeypatch.setattr(type(documents.tokenizer), "mask", None)
    with pytest.raises(UserError, match=r"has no piece for a hidden token \(\[MASK\]\): prepare it with fasttfm mlm"):
        MaskedModelling("bert").open(data)


def test_the_rows_of_validation_are_hidden_alike_whatever_the_seed(data):
    documents = PreparedDocuments.open(data)
    task, drawn = MaskedModelling("bert"), []
    for seed in (1, 2):
        config = task.build(values("bert", seed=seed), documents)
        batches = task.validator(config, documents, CPU).batches
        drawn.append(batches.batch(batches.in_order()[0]))
        assert not dataclasses.replace(config.data).phrases
    assert torch.equal(drawn[0].tokens, drawn[1].tokens)
