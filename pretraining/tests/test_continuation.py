"""Going on with a prompt: the search's cache equals full passes, and samples have the model's probabilities."""

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.config.sampling import Sampling
from fasttfm_pretraining.data.text_tokenizer import ByteTokenizer
from fasttfm_pretraining.decoding.continuation import continue_ids, generate
from fasttfm_pretraining.models.gpt import GPT

END = 3


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = GPT(GPTConfig(vocab_size=12, d_model=16, heads=2, d_ff=32, layers=2, max_length=16))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.35)
    return made


def test_samples_have_the_models_probabilities(model):
    """Chi-square over the first token of 4,000 samples; with 12 classes it passes 31.3 once in a thousand times."""
    drawn = torch.tensor(continue_ids(model, [END, 5], 1, 4000, Sampling(seed=3), None))[:, 0]
    with torch.no_grad():
        expected = 4000 * model.eval()(torch.tensor([[END, 5]]))[0, -1].softmax(-1)
    counts = torch.bincount(drawn, minlength=12)
    assert ((counts - expected) ** 2 / expected).sum() < 31.3
    warmer = torch.tensor(continue_ids(model, [END, 5], 1, 4000, Sampling(seed=3, temperature=3.0), None))[:, 0]
    assert ((torch.bincount(warmer, minlength=12) - expected) ** 2 / expected).sum() > 31.3  # the test can fail


@pytest.mark.parametrize(("changes", "allowed"), [({"top_k": 3}, 3), ({"top_p": 0.5}, None)])
def test_top_k_and_top_p_draw_from_the_likeliest(model, changes, allowed):
    with torch.no_grad():
        p, order = model.eval()(torch.tensor([[END, 5]]))[0, -1].softmax(-1).sort(descending=True)
    count = allowed or int((p.cumsum(0) < 0.5).sum()) + 1
    drawn = {ids[0] for ids in continue_ids(model, [END, 5], 1, 500, Sampling(**changes), None)}
    assert drawn == set(order[:count].tolist())


def test_a_seed_decides_each_text_whatever_is_drawn_beside_it(model):
    alone = continue_ids(model, [END], 12, 1, Sampling(seed=5), END)
    among = continue_ids(model, [END], 12, 6, Sampling(seed=5), END)
    assert among[0] == alone[0]
    assert len({tuple(text) for text in among}) > 1
    assert among != continue_ids(model, [END], 12, 6, Sampling(seed=6), END)
    assert all(END not in text for text in among)
    endless = continue_ids(model, [END], 12, 6, Sampling(seed=5), None)
    for text, without_end in zip(among, endless, strict=True):
        assert text == (without_end[: without_end.index(END)] if END in without_end else without_end)


def test_past_the_context_the_last_half_of_it_is_read_anew(model):
    (actual,) = continue_ids(model, [END, 5], 40, 1, Sampling(temperature=0), None)
    text, begin = [END, 5], 0
    with torch.no_grad():
        for _ in range(40):
            if len(text) - begin > 16:
                begin = len(text) - 8
            text.append(int(model.eval()(torch.tensor([text[begin:]]))[0, -1].argmax()))
    assert actual == text[2:]
    among = continue_ids(model, [END], 40, 6, Sampling(seed=5), END)
    assert among[2] == continue_ids(model, [END], 40, 3, Sampling(seed=5), END)[2]
    long = torch.arange(50).remainder(9).tolist()  # of a longer prompt the end is read
    assert continue_ids(model, long, 4, 1, Sampling(), None) == continue_ids(model, long[-16:], 4, 1, Sampling(), None)


def test_what_has_no_text_is_never_drawn():
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    padded = GPT(GPTConfig(vocab_size=320, d_model=16, heads=2, d_ff=32, layers=1, max_length=64))
    with torch.no_grad():  # without care all draws are from the 59 rows without a text
        padded.embedding.weight[len(tokenizer) :] *= 100
    never = tokenizer.textless(320)
    assert never == list(range(len(tokenizer), 320))
    drawn = continue_ids(padded, [END], 40, 4, Sampling(), None, never)
    assert max(map(max, drawn)) < len(tokenizer)
    assert max(map(max, continue_ids(padded, [END], 40, 4, Sampling(), None))) >= len(tokenizer)


def test_a_prompt_begins_the_text():
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    model = GPT(GPTConfig(vocab_size=len(tokenizer), d_model=16, heads=2, d_ff=32, layers=1, max_length=24))
    assert [text[:9] for text in generate(model, tokenizer, "Two\nlines", 10, 3, Sampling())] == ["Two\nlines"] * 3
    with pytest.warns(RuntimeWarning, match="outgrow the model's 24 positions"):
        (text,) = generate(model, tokenizer, "1234567890" * 5, 40, 1, Sampling(top_k=1))
    assert text.startswith("1234567890" * 5)
    with pytest.raises(UserError, match="--top-p"):
        Sampling(top_p=0.0)
    for changes in ({"top_k": 3}, {"top_p": 0.5}, {"seed": 2}):
        with pytest.raises(UserError, match="does nothing while --temperature is 0"):
            Sampling(temperature=0, **changes)
    with pytest.raises(UserError, match="--tokens 0"):
        generate(model, tokenizer, "", 0, 1, Sampling())
