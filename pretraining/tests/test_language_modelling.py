"""Training of a language model: what it computes, and that stopping at any moment changes nothing."""

import pytest
import torch
from torch import nn
from training.runs import assert_same_weights, log_without_times, weights_of
from training.tiny import TINY

from fasttfm.cli.main import main
from fasttfm.config import gather
from fasttfm.errors import UserError
from fasttfm.store.model_dir import read_kind
from fasttfm.store.run_log import read_log
from fasttfm.training.run import train
from fasttfm_pretraining.config.data import DocumentOptions
from fasttfm_pretraining.data.documents import PreparedDocuments, RowBatches
from fasttfm_pretraining.data.prepare_documents import prepare_documents
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.training.language_modelling import LanguageModelling, evaluate

CPU = torch.device("cpu")
RECIPE = {name: value for name, value in TINY.items() if not name.endswith("coder_layers")}
RECIPE |= {"d_model": 16, "d_ff": 32, "layers": 2, "max_length": 32, "max_tokens": 96, "row_length": 32}
RECIPE |= {"label_smoothing": 0.0}
WIDE = {"d_model": 256, "heads": 8, "d_ff": 256, "max_tokens": 512}
"""Sizes at which half a batch enters the passes compiled by numba."""


def values(**changes):
    return gather(overrides={**RECIPE, **changes}, kind="gpt")


def run(data, out, **changes):
    return train(values(**changes), data, out, CPU, task=LanguageModelling())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "dog", "run", "to", "the", "tree"]
    draw = torch.Generator().manual_seed(0)
    lines = [" ".join(words[i] for i in torch.randint(0, 14, (6,), generator=draw)) for _ in range(150)]
    (folder / "text.txt").write_text("\n\n".join("\n".join(lines[i : i + 3]) for i in range(0, 150, 3)) + "\n")
    options = DocumentOptions(vocabulary="bytes", document_separator="")
    prepare_documents([folder / "text.txt"], folder / "D", options, say=lambda line: None)
    return folder / "D"


def test_a_run_learns_logs_and_its_directory_says_what_it_holds(data, tmp_path):
    outcome = run(data, tmp_path / "M", max_update=40, lr=1e-2, average_last=2, valid_interval_updates=20)
    records = read_log(tmp_path / "M")
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses[-1] < 0.6 * losses[0]
    scores = [record for record in records if record["kind"] == "valid"]
    assert [record["step"] for record in scores] == [20, 40]
    assert outcome.score.bits_per_byte == scores[-1]["bits_per_byte"] < 4
    assert "bits per byte" in str(outcome.score)
    assert read_kind(tmp_path / "M") == "gpt"
    prepared = PreparedDocuments.open(data)
    model = GPT.from_pretrained(tmp_path / "M", "last")
    repeated = evaluate(model, prepared.tokenizer, tmp_path / "M", data=data)
    assert repeated.bits_per_byte == pytest.approx(outcome.score.bits_per_byte, rel=1e-5)
    # bits of all tokens, ends of documents among them, over the bytes of the text
    tokens, text = prepared.valid.tokens, prepared.valid.bytes
    assert repeated.bits_per_byte == pytest.approx(repeated.nll / 0.6931471805599453 * tokens / text)


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", "update_freq": 2, "ema_decay": 0.9, "clip_norm": 1.0}])
def test_a_run_in_two_sessions_equals_one_in_a_single_session(data, tmp_path, changes):
    run(data, tmp_path / "whole", **changes)
    run(data, tmp_path / "parts", **changes, max_update=5)
    run(data, tmp_path / "parts", **changes)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    logs = [log_without_times(tmp_path / name) for name in ("whole", "parts")]
    assert [r for r in logs[0] if r["kind"] == "train"] == [r for r in logs[1] if r["kind"] == "train"]


class Plain(nn.Module):
    """The same model on torch.nn alone, one document's part of a row after the other."""

    def __init__(self, weights):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(261, 16), nn.Embedding(32, 16)
        gelu = nn.GELU(approximate="tanh")
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, gelu, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.load_state_dict(weights)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: len(tokens)]
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens))
        return self.decoder(x[None], mask, is_causal=True)[0] @ self.embedding.weight.t()


def test_the_losses_of_fifty_updates_are_those_of_a_plain_loop(data, tmp_path):
    settings = {"dropout": 0.0, "attention_dropout": 0.0, "log_interval": 1, "valid_interval_updates": 0}
    run(data, tmp_path / "M", **settings, max_update=50, schedule="constant", warmup_updates=0, optimizer="adamw")
    losses = [record["loss"] for record in read_log(tmp_path / "M") if record["kind"] == "train"]
    prepared = PreparedDocuments.open(data)
    config = LanguageModelling().build(values(**settings), prepared)
    torch.manual_seed(config.training.seed)
    weights = GPT(config.model).state_dict()
    del weights["output.weight"]
    plain = Plain(weights)
    recipe = config.training
    optimizer = torch.optim.AdamW(
        plain.parameters(), recipe.lr, betas=recipe.adam_betas, eps=recipe.adam_eps, weight_decay=0.0
    )
    batches = RowBatches(prepared.train, 32, 96, recipe.seed)
    order = [rows for epoch in range(3) for rows in batches.epoch(epoch)][:50]
    expected = []
    for rows in order:
        batch = batches.batch(rows)
        parts = zip(batch.tokens[0].split(batch.lengths.tolist()), batch.targets[0].split(batch.lengths.tolist()))
        total = sum(nn.functional.cross_entropy(plain(part), wanted, reduction="sum") for part, wanted in parts)
        loss = total / batch.target_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert len(losses) == 50
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert losses[-1] < 0.8 * losses[0]


def test_wrong_settings_checkpoints_and_kinds_end_in_one_line(data, tmp_path, refusal_of):
    for changes, message in (({"row_length": 64}, "positions"), ({"max_tokens": 16}, "a single row")):
        with pytest.raises(UserError, match=message):
            run(data, tmp_path / "M", **changes)
    with pytest.raises(UserError, match="encoder_layers is unknown"):
        values(encoder_layers=2)
    run(data, tmp_path / "M", max_update=2)
    assert "kind gpt" in refusal_of(["translate", tmp_path / "M"])
    with pytest.raises(UserError, match="was not found"):
        GPT.from_pretrained(tmp_path / "M", "7")
    with pytest.raises(UserError, match="layers 2, now it is 3"):
        run(data, tmp_path / "M", max_update=3, layers=3)
    (tmp_path / "M" / "config.yaml").write_text("kind: transformer\nmodel: {}\n")
    with pytest.raises(UserError, match="kind transformer"):
        GPT.from_pretrained(tmp_path / "M")


def command(data, out, **changes):
    """`fasttfm lm train` of the recipe."""
    words = ["lm", "train", "--device", "cpu", "--data", str(data), "--out", str(out)]
    for name, value in {**RECIPE, **WIDE, "dropout": 0.0, "attention_dropout": 0.0, **changes}.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return words


@pytest.mark.whole
def test_two_ranks_end_in_the_weights_of_one_also_where_the_model_is_divided(run_ranks, data, tmp_path):
    """adam_eps: the gradient of a key's bias is 0, and by Adam's 1e-8 its rounding would become steps."""
    runs = {"one": (1, {}), "two": (2, {}), "divided": (2, {"shard": True})}
    words = [
        {"size": size, "words": command(data, tmp_path / name, adam_eps=1e-4, **more)}
        for name, (size, more) in runs.items()
    ]
    statuses, errors = run_ranks(*words)
    assert [status for each in statuses for status in each] == [0] * 5, errors
    one = weights_of(tmp_path / "one")
    for name in ("two", "divided"):
        other = weights_of(tmp_path / name)
        assert one.keys() == other.keys()
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=2e-5, msg=f"{name} {key}")
    assert main(["average", str(tmp_path / "divided"), "--last", "1"]) == 0
    assert GPT.from_pretrained(tmp_path / "divided", "average").config.layers == 2
