"""AutoModelForSeq2SeqLM on our directories: generate(), caches, padding, saving and the Trainer."""

import pytest
import torch
from model_dirs import LINES, LONGEST, PAIRS, compare, write_model_dir
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from fasttfm.cli.main import main
from fasttfm.convert import auto_model
from fasttfm.data.tokenizer import BOS, EOS, PAD
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.search.batches import padded
from fasttfm.translate import Translator

auto_model.register()
SOURCE, TARGET = torch.tensor([[5, 6, EOS]]), torch.tensor([[BOS, 7, 9]])
GIVEN = {"input_ids": SOURCE, "decoder_input_ids": TARGET}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("auto") / "model")


def pretrained(model_dir, name="pretrained"):
    """Save a model directory with save_pretrained() and load it as transformers' model."""
    Transformer.from_pretrained(model_dir).save_pretrained(model_dir.parent / name, model_dir)
    return AutoModelForSeq2SeqLM.from_pretrained(model_dir.parent / name)


@pytest.fixture(scope="module")
def theirs(model_dir):
    return pretrained(model_dir)


@pytest.fixture(scope="module")
def right(model_dir):
    """Sources padded on the right, and their mask."""
    tokenizer = Translator.from_directory(model_dir).source_tokenizer
    ids, lengths = padded([[*tokenizer.encode(line), EOS] for line in LINES], torch.device("cpu"))
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


@pytest.fixture(scope="module")
def left(right):
    """The same rows with padding on the left."""
    return {name: moved_left(x, right["attention_mask"]) for name, x in right.items()}


def moved_left(x, mask):
    return torch.stack([row.roll(int((seen == 0).sum()), 0) for row, seen in zip(x, mask, strict=True)])


@pytest.mark.parametrize("beam", [1, 4])
def test_generate_finds_what_our_search_finds(model_dir, theirs, right, beam):
    tokenizer = Translator.from_directory(model_dir).source_tokenizer
    actual = theirs.generate(
        **right, num_beams=beam, max_new_tokens=LONGEST + 1, min_new_tokens=2, length_penalty=0.0
    )  # fmt: skip
    compare(model_dir, [tokenizer.decode(row) for row in actual.tolist()], beam)
    assert (theirs.generation_config.num_beams, theirs.generation_config.length_penalty) == (4, 0.0)


def test_labels_give_a_loss_with_gradients(theirs):
    labels = torch.tensor([[7, EOS, -100]])
    output = theirs(input_ids=SOURCE, labels=labels)
    given = theirs.model(SOURCE, torch.tensor([[BOS, 7, EOS]]))
    torch.testing.assert_close(output.logits[:, :2], given[:, :2])
    expected = torch.nn.functional.cross_entropy(given[0, :2], torch.tensor([7, EOS]))
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(theirs(input_ids=SOURCE, labels=labels, num_items_in_batch=8).loss, expected * 2 / 8)
    output.loss.backward()
    assert theirs.model.target_embedding.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_target_padding_follows_the_mask(theirs, right, left):
    ids, mask = right.values()
    targets = torch.cat([torch.full_like(ids[:, :1], BOS), ids[:, :-1]], dim=1)
    expected = theirs(**right, decoder_input_ids=targets, output_attentions=True)
    moved = {"decoder_input_ids": moved_left(targets, mask), "decoder_attention_mask": left["attention_mask"]}
    actual = theirs(**left, **moved, output_attentions=True)
    torch.testing.assert_close(actual.logits[left["attention_mask"].bool()], expected.logits[mask.bool()])
    for layer, ours in zip(actual.cross_attentions, expected.cross_attentions, strict=True):
        for row, length in enumerate(mask.sum(dim=1)):
            torch.testing.assert_close(layer[row, :, -length:, -length:], ours[row, :, :length, :length])
    given = theirs.model.attention_weights(ids, targets, mask.sum(dim=1))
    for side in ("encoder", "decoder", "cross"):
        torch.testing.assert_close(list(expected[f"{side}_attentions"]), list(given[side]))


def test_generate_continues_a_prefix_padded_on_the_left(theirs, right):
    ids, mask = (x[:2] for x in right.values())
    prefix, seen = torch.tensor([[BOS, 9, 11], [PAD, BOS, 7]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    search = {"num_beams": 1, "max_new_tokens": 6, "min_new_tokens": 6}
    targets = {"decoder_input_ids": prefix, "decoder_attention_mask": seen}
    both = theirs.generate(input_ids=ids, attention_mask=mask, **targets, **search)
    alone = theirs.generate(input_ids=ids[1:], attention_mask=mask[1:], decoder_input_ids=prefix[1:, 1:], **search)
    assert torch.equal(both[1, 1:], alone[0])


@torch.no_grad()
def test_hidden_states_are_the_layers_inputs_and_the_last_output(theirs, left, monkeypatch):
    given = {**left, "decoder_input_ids": torch.tensor([[BOS, 9, 11]]).expand(len(LINES), -1)}
    plain, output = theirs(**given), theirs(**given, output_hidden_states=True)
    torch.testing.assert_close(output.logits, plain.logits)
    assert len(output.encoder_hidden_states) == len(output.decoder_hidden_states) == 3
    seen = left["attention_mask"].bool()
    torch.testing.assert_close(output.encoder_hidden_states[-1][seen], plain.encoder_last_hidden_state[seen])
    torch.testing.assert_close(theirs.get_output_embeddings()(output.decoder_hidden_states[-1]), plain.logits)
    for number, layer in enumerate(theirs.model.encoder.layers):
        before, after = (states[:1, seen[0]] for states in output.encoder_hidden_states[number : number + 2])
        torch.testing.assert_close(layer(before), after)
    monkeypatch.setattr(theirs.config, "output_hidden_states", True)
    assert len(theirs(**given).decoder_hidden_states) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs_embeds": torch.ones(1, 3, 32)}, "inputs_embeds is not supported by FasttfmForSeq2SeqLM"),
        ({"colour": "red"}, "colour is not supported by FasttfmForSeq2SeqLM"),
        ({"attention_mask": torch.ones(1, 2)}, r"attention_mask is \(1, 2\): it must be \(1, 3\)"),
        ({"attention_mask": torch.tensor([[0.0, 0.0, -1e9]])}, "attention_mask has other numbers than 1"),
        ({"decoder_input_ids": None}, "decoder_input_ids or labels are needed"),
        ({"input_ids": None}, "input_ids or encoder_outputs are needed"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(theirs, given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        theirs(**GIVEN | given)


def test_unsupported_options_of_loading_and_saving_are_refused_by_name(model_dir, theirs, tmp_path):
    with pytest.raises(ValueError, match="device_map is not supported"):
        type(theirs).from_pretrained(model_dir.parent / "pretrained", device_map="auto")
    with pytest.raises(ValueError, match="push_to_hub is not supported"):
        theirs.save_pretrained(tmp_path, push_to_hub=True)
    with pytest.raises(UserError, match="is a model directory of fasttfm train"):
        theirs.save_pretrained(model_dir)
    with pytest.raises(ValueError, match="new_num_tokens is 2: four tokens are special"):
        theirs.resize_token_embeddings(2)
    separate = pretrained(write_model_dir(tmp_path / "separate", trained=False, share_embeddings="decoder"))
    with pytest.raises(ValueError, match="share_embeddings is not all"):
        separate.resize_token_embeddings(99)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("start", [1, 3])
def test_a_cache_changes_no_translation_and_takes_each_target_once(theirs, left, monkeypatch, beam, start):
    widths, decode = [], Transformer._decode

    def counted(self, target, *inputs, **options):
        widths.append(target.shape[1])
        return decode(self, target, *inputs, **options)

    monkeypatch.setattr(Transformer, "_decode", counted)
    found = []
    prefix = torch.tensor([[BOS, 9, 11]])[:, :start].expand(len(LINES), -1)
    for use_cache in (True, False):
        widths.clear()
        found.append(theirs.generate(
            **left, decoder_input_ids=prefix, num_beams=beam, max_new_tokens=12, use_cache=use_cache,
            output_scores=True, return_dict_in_generate=True,
        ))  # fmt: skip
        assert widths == [start if use_cache and not step else 1 if use_cache else start + step
                          for step in range(len(widths))]  # fmt: skip
        assert len(widths) > 4
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].scores, found[1].scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_a_cache_is_accepted_under_both_names(theirs, name):
    prefix = {"input_ids": SOURCE, "decoder_input_ids": TARGET[:, :2], "use_cache": True}
    full, first = theirs(**GIVEN), theirs(**prefix)
    given = {"encoder_outputs": (full.encoder_last_hidden_state,), name: first[auto_model.CACHE]}
    step = theirs.prepare_inputs_for_generation(TARGET, **given)
    assert step["decoder_input_ids"].tolist() == [[9]]
    torch.testing.assert_close(theirs(**step).logits, full.logits[:, -1:])
    again = theirs(**prefix)[auto_model.CACHE]
    search = {"decoder_input_ids": TARGET, "num_beams": 1, "max_new_tokens": 4}
    expected = theirs.generate(SOURCE, **search)
    assert torch.equal(theirs.generate(SOURCE, **search, **{name: again}), expected)
    assert again.length == expected.shape[1] - 1  # the search went on with the cache that was given
    for call in (theirs, theirs.generate, theirs.prepare_inputs_for_generation):
        with pytest.raises(ValueError, match=r"^cache and past_key_values are both given"):
            call(SOURCE, decoder_input_ids=TARGET, cache=again, past_key_values=again)
        with pytest.raises(ValueError, match=f"^{name} is a tuple"):
            call(SOURCE, decoder_input_ids=TARGET, **{name: ()})


@pytest.mark.parametrize("mean", [True, False])
def test_a_vocabulary_is_resized_with_its_table_output_and_bias(tmp_path, mean):
    model = pretrained(write_model_dir(tmp_path / "model", trained=False, output_bias=True), "a")
    before = model.get_input_embeddings().weight.detach().clone()
    given = {"input_ids": SOURCE, "labels": torch.tensor([[7, EOS]])}
    logits = model(**given).logits
    table = model.resize_token_embeddings(len(before) + 3, pad_to_multiple_of=8, mean_resizing=mean)
    size = -(-(len(before) + 3) // 8) * 8
    assert table.weight.shape == (size, before.shape[1])
    assert table.weight is model.get_output_embeddings().weight is model.model.source_embedding.weight
    assert torch.equal(table.weight[: len(before)], before)
    added = table.weight[len(before) :]
    assert torch.equal(added, before.mean(dim=0).expand_as(added)) is mean
    torch.testing.assert_close(model(**given).logits[..., : len(before)], logits)
    model(**{**given, "labels": torch.tensor([[size - 1, EOS]])}).loss.backward()
    assert table.weight.grad[size - 1].abs().sum() > 0
    model.save_pretrained(tmp_path / "b")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "b")
    assert again.config.vocab_size == size
    assert torch.equal(again.get_input_embeddings().weight, table.weight)


@torch.no_grad()
def test_return_dict_dtype_and_fields_are_honoured(model_dir, theirs):
    first, *_ = theirs(**GIVEN, return_dict=False)
    assert torch.equal(first, theirs(**GIVEN).logits)
    half = type(theirs).from_pretrained(model_dir.parent / "pretrained", dtype=torch.bfloat16, dropout=0.3)
    assert half(**GIVEN).logits.dtype == torch.bfloat16
    assert half.model.config.dropout == 0.3


def test_the_weights_of_a_subfolder_are_loaded_and_not_those_around_it(theirs, tmp_path):
    """As of a run of Trainer, which saves its checkpoints below its last model."""
    theirs.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "checkpoint-500")
    zeros = {name: torch.zeros_like(each) for name, each in load_file(tmp_path / "model.safetensors").items()}
    save_file(zeros, tmp_path / "checkpoint-500" / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, subfolder="checkpoint-500")
    assert not any(each.any() for each in loaded.parameters())


@pytest.mark.parametrize("shared", ["all", "decoder", "none"])
def test_save_pretrained_and_from_pretrained_round_trip(tmp_path, shared):
    model_dir = write_model_dir(tmp_path / "model", trained=False, share_embeddings=shared)
    first = pretrained(model_dir, "a")
    first.save_pretrained(tmp_path / "b")
    names = {file.name for file in (tmp_path / "a").iterdir()} - {"README.md", ".lock", "sha256sums"}
    of_transformers = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "b").iterdir()} == names | of_transformers
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert main(["export", str(model_dir), "--format", "pretrained", "--out", str(tmp_path / "e")]) == 0
    ours = Translator.from_directory(model_dir).source_tokenizer
    expected = Translator.from_directory(model_dir, beam=1, max_len_b=5).translate(LINES)
    for folder in ("b", "e"):
        assert Translator.from_directory(tmp_path / folder, beam=1, max_len_b=5).translate(LINES) == expected
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
        for line in LINES:
            assert tokenizer(line)["input_ids"] == [*ours.encode(line), EOS]
            assert tokenizer.decode(ours.encode(line)) == line
    stored = load_file(tmp_path / "b" / "model.safetensors")  # as Trainer loads its best checkpoint
    found = auto_model.FasttfmForSeq2SeqLM(first.config).load_state_dict(stored)
    assert not [*found.missing_keys, *found.unexpected_keys]


@pytest.mark.sample(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_seq2seq_trainer_trains_saves_and_loads_its_best(tmp_path, model_dir, smoothing):
    pytest.importorskip("accelerate")
    model = pretrained(model_dir, "first")
    tokenizer = Translator.from_directory(model_dir).source_tokenizer
    pairs = [(tokenizer.encode(target), tokenizer.encode(source)) for source, target in PAIRS.items()]  # the other way
    data = [{"input_ids": [*source, EOS], "labels": [*target, EOS]} for source, target in pairs]

    arguments = Seq2SeqTrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=12,
        learning_rate=3e-3, label_smoothing_factor=smoothing, save_strategy="epoch", eval_strategy="epoch",
        load_best_model_at_end=True, save_total_limit=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        predict_with_generate=True, generation_max_length=20, generation_num_beams=1,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "with tokenizer")
    collator = DataCollatorForSeq2Seq(
        AutoTokenizer.from_pretrained(tmp_path / "with tokenizer", padding_side="left"), model
    )
    trainer = Seq2SeqTrainer(model, arguments, collator, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2
    predicted = trainer.predict(data).predictions
    for row, each in zip(predicted.tolist(), data, strict=True):
        (alone,) = model.generate(torch.tensor([each["input_ids"]]), num_beams=1, max_length=20).tolist()
        assert row[: len(alone)] == alone
    trainer.save_model(str(tmp_path / "last"))
    best = type(model).from_pretrained(tmp_path / "last")
    torch.testing.assert_close(best.state_dict(), model.state_dict(), rtol=0, atol=0)
