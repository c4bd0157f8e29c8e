"""AutoModelForSeq2SeqLM of our directories: generate() finds what our search finds."""

from __future__ import annotations

import pytest
import torch
from model_dirs import LINES, LONGEST, compare, write_model_dir

pytest.importorskip("transformers")

from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.decoding import Translator
from fasttfm.decoding.batches import padded
from fasttfm.interop import auto_model
from fasttfm.models import Transformer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("auto") / "model")


@pytest.fixture(scope="module")
def theirs(model_dir):
    from transformers import AutoModelForSeq2SeqLM

    auto_model.register()
    Transformer.from_pretrained(model_dir).save_pretrained(model_dir.parent / "pretrained", model_dir)
    return AutoModelForSeq2SeqLM.from_pretrained(model_dir.parent / "pretrained")


@pytest.mark.parametrize("beam", [1, 4])
def test_generate_finds_what_our_search_finds(model_dir, theirs, beam):
    tokenizer = Translator.from_directory(model_dir).source_tokenizer
    ids, lengths = padded([[*tokenizer.encode(line), EOS] for line in LINES], torch.device("cpu"))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    actual = theirs.generate(
        input_ids=ids, attention_mask=mask, num_beams=beam, max_new_tokens=LONGEST + 1, min_new_tokens=2,
        length_penalty=0.0,
    )  # fmt: skip
    compare(model_dir, [tokenizer.decode(row) for row in actual.tolist()], beam)


def test_the_directorys_way_of_searching_is_known(theirs):
    assert theirs.generation_config.num_beams == 4
    assert theirs.generation_config.length_penalty == 0.0


def test_labels_give_a_loss_with_gradients(theirs):
    source, target = torch.tensor([[5, 6, EOS]]), torch.tensor([[7, EOS, -100]])
    output = theirs(input_ids=source, labels=target)
    given = theirs.model(source, torch.tensor([[BOS, 7, EOS]]))
    torch.testing.assert_close(output.logits[:, :2], given[:, :2])
    expected = torch.nn.functional.cross_entropy(given[0, :2], torch.tensor([7, EOS]))
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    assert theirs.model.target_embedding.weight.grad.abs().sum() > 0
