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


def rows(model_dir, lines):
    """Sources padded on the right, and their mask."""
    tokenizer = Translator.from_directory(model_dir).source_tokenizer
    ids, lengths = padded([[*tokenizer.encode(line), EOS] for line in lines], torch.device("cpu"))
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def moved_left(x, mask):
    """The same rows with padding on the left."""
    return torch.stack([row.roll(int((seen == 0).sum()), 0) for row, seen in zip(x, mask, strict=True)])


@pytest.mark.parametrize("beam", [1, 4])
def test_generate_finds_what_our_search_finds(model_dir, theirs, beam):
    tokenizer = Translator.from_directory(model_dir).source_tokenizer
    ids, mask = rows(model_dir, LINES)
    actual = theirs.generate(
        input_ids=ids, attention_mask=mask, num_beams=beam, max_new_tokens=LONGEST + 1, min_new_tokens=2,
        length_penalty=0.0,
    )  # fmt: skip
    compare(model_dir, [tokenizer.decode(row) for row in actual.tolist()], beam)
    assert (theirs.generation_config.num_beams, theirs.generation_config.length_penalty) == (4, 0.0)


def test_labels_give_a_loss_with_gradients(theirs):
    source, target = torch.tensor([[5, 6, EOS]]), torch.tensor([[7, EOS, -100]])
    output = theirs(input_ids=source, labels=target)
    given = theirs.model(source, torch.tensor([[BOS, 7, EOS]]))
    torch.testing.assert_close(output.logits[:, :2], given[:, :2])
    expected = torch.nn.functional.cross_entropy(given[0, :2], torch.tensor([7, EOS]))
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(theirs(input_ids=source, labels=target, num_items_in_batch=8).loss, expected * 2 / 8)
    output.loss.backward()
    assert theirs.model.target_embedding.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("beam", [1, 4])
def test_padding_on_the_left_gives_what_padding_on_the_right_gives(model_dir, theirs, beam):
    ids, mask = rows(model_dir, LINES)
    search = {"num_beams": beam, "max_new_tokens": LONGEST, "length_penalty": 0.0}
    expected = theirs.generate(input_ids=ids, attention_mask=mask, **search)
    left = {"input_ids": moved_left(ids, mask), "attention_mask": moved_left(mask, mask)}
    assert torch.equal(theirs.generate(**left, **search), expected)
    assert torch.equal(theirs.generate(input_ids=left["input_ids"], **search), expected)  # padding's number tells
    for row, seen, each in zip(ids, mask, expected.tolist(), strict=True):
        (alone,) = theirs.generate(row[seen.bool()][None], **search).tolist()
        assert each[: len(alone)] == alone
        assert {*each[len(alone) :]} <= {PAD, EOS}


@torch.no_grad()
def test_target_padding_follows_the_mask(model_dir, theirs):
    ids, mask = rows(model_dir, LINES)
    targets = torch.cat([torch.full_like(ids[:, :1], BOS), ids[:, :-1]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = theirs(**inputs, decoder_input_ids=targets, output_attentions=True)
    moved = {"decoder_input_ids": moved_left(targets, mask), "decoder_attention_mask": moved_left(mask, mask)}
    sources = {name: moved_left(x, mask) for name, x in inputs.items()}
    actual = theirs(**sources, **moved, output_attentions=True)
    seen = moved["decoder_attention_mask"].bool()
    torch.testing.assert_close(actual.logits[seen], expected.logits[mask.bool()])
    for theirs_, ours in zip(actual.cross_attentions, expected.cross_attentions, strict=True):
        for row, length in enumerate(mask.sum(dim=1)):
            torch.testing.assert_close(theirs_[row, :, -length:, -length:], ours[row, :, :length, :length])
    given = theirs.model.attention_weights(ids, targets, mask.sum(dim=1))
    for name, side in (("encoder", "encoder"), ("decoder", "decoder"), ("cross", "cross")):
        for layer, other in zip(expected[f"{side}_attentions"], given[name], strict=True):
            torch.testing.assert_close(layer, other)


def test_generate_continues_a_prefix_padded_on_the_left(model_dir, theirs):
    ids, mask = rows(model_dir, LINES[:2])
    prefix = torch.tensor([[BOS, 9, 11], [PAD, BOS, 7]])
    seen = torch.tensor([[1, 1, 1], [0, 1, 1]])
    search = {"num_beams": 1, "max_new_tokens": 6, "min_new_tokens": 6}
    both = theirs.generate(
        input_ids=ids, attention_mask=mask, decoder_input_ids=prefix, decoder_attention_mask=seen, **search
    )
    alone = theirs.generate(
        input_ids=ids[1:], attention_mask=mask[1:], decoder_input_ids=prefix[1:, 1:], **search
    )  # fmt: skip
    assert torch.equal(both[1, 1:], alone[0])


@torch.no_grad()
def test_hidden_states_are_the_layers_inputs_and_the_last_output(model_dir, theirs):
    ids, mask = rows(model_dir, LINES)
    inputs = {"input_ids": moved_left(ids, mask), "attention_mask": moved_left(mask, mask)}
    targets = torch.tensor([[BOS, 9, 11]]).expand(len(ids), -1)
    plain = theirs(**inputs, decoder_input_ids=targets)
    output = theirs(**inputs, decoder_input_ids=targets, output_hidden_states=True)
    torch.testing.assert_close(output.logits, plain.logits)
    assert len(output.encoder_hidden_states) == len(output.decoder_hidden_states) == 3
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(output.encoder_hidden_states[-1][seen], plain.encoder_last_hidden_state[seen])
    torch.testing.assert_close(theirs.get_output_embeddings()(output.decoder_hidden_states[-1]), plain.logits)
    for number, layer in enumerate(theirs.model.encoder.layers):
        given = output.encoder_hidden_states[number][:1, seen[0]]
        following = output.encoder_hidden_states[number + 1][:1, seen[0]]
        torch.testing.assert_close(layer(given), following)
    theirs.config.output_hidden_states = True
    try:
        assert len(theirs(**inputs, decoder_input_ids=targets).decoder_hidden_states) == 3
    finally:
        theirs.config.output_hidden_states = False


def test_unsupported_arguments_are_refused_by_name(model_dir, theirs):
    source, target = torch.tensor([[5, 6, EOS]]), torch.tensor([[BOS, 7]])
    given = {"input_ids": source, "decoder_input_ids": target}
    for name, value in (("inputs_embeds", torch.ones(1, 3, 32)), ("head_mask", torch.ones(2, 2)), ("colour", "red")):
        with pytest.raises(ValueError, match=rf"^{name} is not supported by FasttfmForSeq2SeqLM"):
            theirs(**given, **{name: value})
    with pytest.raises(ValueError, match=r"attention_mask is \(1, 2\): it must be \(1, 3\)"):
        theirs(**given, attention_mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match="attention_mask has other numbers than 1"):
        theirs(**given, attention_mask=torch.tensor([[0.0, 0.0, -1e9]]))
    with pytest.raises(ValueError, match="decoder_input_ids or labels are needed"):
        theirs(input_ids=source)
    with pytest.raises(ValueError, match="device_map is not supported"):
        type(theirs).from_pretrained(model_dir.parent / "pretrained", device_map="auto")


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("start", [1, 3])
def test_a_cache_changes_no_translation_and_takes_each_target_once(model_dir, theirs, monkeypatch, beam, start):
    ids, mask = rows(model_dir, LINES)
    widths, decode = [], Transformer._decode

    def counted(self, target, *inputs, **options):
        widths.append(target.shape[1])
        return decode(self, target, *inputs, **options)

    monkeypatch.setattr(Transformer, "_decode", counted)
    found = {}
    prefix = torch.tensor([[BOS, 9, 11]])[:, :start].expand(len(ids), -1)
    for use_cache in (True, False):
        widths.clear()
        found[use_cache] = theirs.generate(
            input_ids=moved_left(ids, mask), attention_mask=moved_left(mask, mask), decoder_input_ids=prefix,
            num_beams=beam, max_new_tokens=12, use_cache=use_cache, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        steps = range(len(widths))
        assert widths == [start if use_cache and not step else 1 if use_cache else start + step for step in steps]
        assert len(widths) > 4
    assert torch.equal(found[True].sequences, found[False].sequences)
    for with_cache, without in zip(found[True].scores, found[False].scores, strict=True):
        torch.testing.assert_close(with_cache, without, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_a_cache_is_accepted_under_both_names(theirs, name):
    source, target = torch.tensor([[5, 6, EOS]]), torch.tensor([[BOS, 7, 9]])
    full = theirs(input_ids=source, decoder_input_ids=target)
    first = theirs(input_ids=source, decoder_input_ids=target[:, :2], use_cache=True)
    given = {"encoder_outputs": (full.encoder_last_hidden_state,), name: first[auto_model.CACHE]}
    step = theirs.prepare_inputs_for_generation(target, **given)
    assert step["decoder_input_ids"].tolist() == [[9]]
    torch.testing.assert_close(theirs(**step).logits, full.logits[:, -1:])
    again = theirs(input_ids=source, decoder_input_ids=target[:, :2], use_cache=True)[auto_model.CACHE]
    search = {"decoder_input_ids": target, "num_beams": 1, "max_new_tokens": 4}
    expected = theirs.generate(source, **search)
    assert torch.equal(theirs.generate(source, **search, **{name: again}), expected)
    assert again.length == expected.shape[1] - 1  # the search went on with the cache that was given
    for call in (theirs, theirs.generate, theirs.prepare_inputs_for_generation):
        with pytest.raises(ValueError, match=r"^cache and past_key_values are both given: .*give cache alone$"):
            call(source, decoder_input_ids=target, cache=again, past_key_values=again)
        with pytest.raises(ValueError, match=f"^{name} is a tuple: give what a call with use_cache=True returned$"):
            call(source, decoder_input_ids=target, **{name: ()})


def test_no_cache_is_made_that_could_not_be_used(theirs):
    given = {"input_ids": torch.tensor([[5, 6, EOS]]), "decoder_input_ids": torch.tensor([[BOS, 7]])}
    assert theirs(**given, use_cache=True).get(auto_model.CACHE) is None  # gradients
    with torch.no_grad():
        assert theirs(**given, use_cache=True)[auto_model.CACHE].get_seq_length() == 2
        for options in ({}, {"output_attentions": True}, {"decoder_attention_mask": torch.ones(1, 2)}):
            assert theirs(**given, **{"use_cache": bool(options), **options}).get(auto_model.CACHE) is None


@pytest.mark.parametrize("mean", [True, False])
def test_a_vocabulary_is_resized_with_its_table_output_and_bias(tmp_path, mean):
    model = pretrained(write_model_dir(tmp_path / "model", trained=False, output_bias=True), "a")
    before = model.get_input_embeddings().weight.detach().clone()
    given = {"input_ids": torch.tensor([[5, 6, EOS]]), "labels": torch.tensor([[7, EOS]])}
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
    assert torch.equal(model.resize_token_embeddings(len(before)).weight, before)
    torch.testing.assert_close(model(**given).logits, logits)
    with pytest.raises(ValueError, match="new_num_tokens is 2: four tokens are special"):
        model.resize_token_embeddings(2)
    separate = pretrained(write_model_dir(tmp_path / "separate", trained=False, share_embeddings="decoder"), "c")
    with pytest.raises(ValueError, match="share_embeddings is not all"):
        separate.resize_token_embeddings(99)


@torch.no_grad()
def test_return_dict_dtype_and_fields_are_honoured(model_dir, theirs):
    given = {"input_ids": torch.tensor([[5, 6, EOS]]), "decoder_input_ids": torch.tensor([[BOS, 7]])}
    first, *_ = theirs(**given, return_dict=False)
    assert torch.equal(first, theirs(**given).logits)
    folder = model_dir.parent / "pretrained"
    half = type(theirs).from_pretrained(folder, dtype=torch.bfloat16, dropout=0.3)
    assert half(**given).logits.dtype == torch.bfloat16
    assert half.model.config.dropout == 0.3


def test_the_weights_of_a_subfolder_are_loaded_and_not_those_around_it(model_dir, theirs, tmp_path):
    """As of a run of Trainer, which saves its checkpoints below its last model."""
    theirs.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "checkpoint-500")
    weights = load_file(tmp_path / "model.safetensors")
    zeros = {name: torch.zeros_like(each) for name, each in weights.items()}
    save_file(zeros, tmp_path / "checkpoint-500" / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, subfolder="checkpoint-500")
    assert not any(each.any() for each in loaded.parameters())


@pytest.mark.parametrize("shared", ["all", "decoder", "none"])
def test_save_pretrained_and_from_pretrained_round_trip(tmp_path, shared):
    model_dir = write_model_dir(tmp_path / "model", trained=False, share_embeddings=shared)
    first = pretrained(model_dir, "a")
    first.save_pretrained(tmp_path / "b")
    names = {file.name for file in (tmp_path / "a").iterdir()} - {"README.md", ".lock", "sha256sums"}
    assert {file.name for file in (tmp_path / "b").iterdir()} == {
        *names,
        *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    }
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
    assert not found.missing_keys
    assert not found.unexpected_keys
    with pytest.raises(UserError, match="is a model directory of fasttfm train"):
        first.save_pretrained(model_dir)
    first.generation_config.num_beams = 7
    first.save_pretrained(tmp_path / "a")
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "a").generation_config.num_beams == 7
    first.load_state_dict(first.state_dict())
    first.save_pretrained(tmp_path / "c", state_dict={name: x.clone() for name, x in first.state_dict().items()})
    assert load_file(tmp_path / "c" / "model.safetensors").keys() == stored.keys()


@pytest.mark.sample(1)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_seq2seq_trainer_trains_saves_and_loads_its_best(tmp_path, model_dir, smoothing):
    pytest.importorskip("accelerate")
    Transformer.from_pretrained(model_dir).save_pretrained(tmp_path / "first", model_dir)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "first")
    tokenizer = Translator.from_directory(model_dir).source_tokenizer
    pairs = [(tokenizer.encode(target), tokenizer.encode(source)) for source, target in PAIRS.items()]  # the other way
    data = [{"input_ids": [*source, EOS], "labels": [*target, EOS]} for source, target in pairs]

    arguments = Seq2SeqTrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=20,
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
    after = trainer.evaluate()["eval_loss"]
    assert after < before / 2
    predicted = trainer.predict(data).predictions
    for row, each in zip(predicted.tolist(), data, strict=True):
        (alone,) = model.generate(torch.tensor([each["input_ids"]]), num_beams=1, max_length=20).tolist()
        assert row[: len(alone)] == alone
    trainer.save_model(str(tmp_path / "last"))
    best = type(model).from_pretrained(tmp_path / "last")
    for name, weight in best.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
