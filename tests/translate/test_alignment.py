"""Cross-attention of given pairs, the coverage penalty, word alignments, and attention plots.

tests/cli/test_translate.py draws a plot from the command line.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from fasttfm.data.tokenizer import train_tokenizer
from fasttfm.errors import UserError
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, search_ids
from fasttfm.search.coverage import coverage, cross_attention
from fasttfm.search.ensemble import Ensemble
from fasttfm.search.streaming import stream_ids
from fasttfm.translate.alignment import WORDS, pharaoh, word_links

EOS = 3


def make_model(seed: int = 5, decoder_layers: int = 3) -> Transformer:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "d_model": 48, "heads": 3, "d_ff": 96, "encoder_layers": 1}
    return Transformer(TransformerConfig(**sizes, decoder_layers=decoder_layers))


def pairs(count: int) -> tuple[list[list[int]], list[list[int]]]:
    draw = random.Random(3)
    sources = [[*draw.choices(range(4, 40), k=draw.randint(1, 20)), EOS] for _ in range(count)]
    return sources, [draw.choices(range(4, 40), k=draw.randint(0, 20)) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_in_every_batch_and_its_rows_sum_to_one(dtype):
    model = make_model().to(dtype)
    sources, targets = pairs(40)
    together = cross_attention(model, sources, targets, DecodingConfig(batch_tokens=4000))
    for source, target, weights in zip(sources, targets, together, strict=True):
        assert weights.shape == (len(target) + 1, len(source))
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(len(target) + 1), atol=0.02, rtol=0)
        assert torch.equal(weights, cross_attention(model, [source], [target], DecodingConfig())[0])


@pytest.mark.parametrize(("layers", "default"), [(1, 1), (2, 2), (3, 2)])
def test_the_layer_can_be_chosen_and_defaults_to_the_last_but_one_or_the_last_of_two(layers, default):
    model = make_model(decoder_layers=layers)
    each = [cross_attention(model, *pairs(1), DecodingConfig(alignment_layer=n))[0] for n in range(layers + 1)]
    assert [torch.equal(each[0], weights) for weights in each[1:]] == [n == default for n in range(1, layers + 1)]
    with pytest.raises(UserError, match=f"alignment_layer 4 is not there: the model has layers 1 to {layers}"):
        cross_attention(model, *pairs(1), DecodingConfig(alignment_layer=4))
    with pytest.raises(ValueError, match="layer 4 is not there"):
        model.cross_attention(torch.tensor([[5, EOS]]), torch.tensor([[2, 5]]), layer=4)


def test_an_ensemble_averages_cross_attention():
    models = [make_model(1), make_model(2, decoder_layers=1)]
    sources, targets = pairs(3)
    *each, together = (
        cross_attention(model, sources, targets, DecodingConfig()) for model in (*models, Ensemble(models))
    )
    for one, other, mean in zip(*each, together, strict=True):
        torch.testing.assert_close(mean, (one + other) / 2)
    with pytest.raises(UserError, match="layers 1 to 1"):
        cross_attention(Ensemble(models), sources, targets, DecodingConfig(alignment_layer=2))


def test_coverage_is_the_papers_formula():
    attention = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]])
    assert coverage(attention) == pytest.approx(math.log(1.0) + 2 * math.log(0.375))
    assert coverage(torch.eye(3)) == 0.0
    assert math.isfinite(coverage(torch.zeros(2, 3))), "weights that underflow in bfloat16 give a finite penalty"


def test_the_coverage_penalty_reranks_all_finished_hypotheses_but_no_samples():
    model = make_model()
    sources, _ = pairs(30)
    plain = search_ids(model, sources, DecodingConfig(beam=5, nbest=5, max_len_b=3))
    settings = DecodingConfig(beam=5, nbest=2, max_len_b=3, coverage_penalty=2.0)
    changed = 0
    for source, before, actual in zip(sources, plain, search_ids(model, sources, settings), strict=True):
        attention = cross_attention(model, [source] * 5, [each.tokens for each in before], settings)
        scores = [each.score + 2.0 * coverage(weights) for each, weights in zip(before, attention)]
        order = sorted(range(5), key=lambda place: -scores[place])
        assert [each.tokens for each in actual] == [before[place].tokens for place in order[:2]]
        assert [each.score for each in actual] == pytest.approx([scores[place] for place in order[:2]])
        assert actual[0].log_probability == before[order[0]].log_probability
        changed += actual[0].tokens != before[0].tokens
    assert changed > 3, "the penalty must change some"

    sampling = replace(settings, beam=1, sampling=True, nbest=5)
    unranked = replace(sampling, coverage_penalty=0.0)
    assert search_ids(model, sources[:5], sampling) == search_ids(model, sources[:5], unranked)
    greedy = replace(settings, beam=1, nbest=1)
    assert list(stream_ids(model, sources[0], greedy)) == search_ids(model, sources[:1], greedy)[0][0].tokens


def test_words_are_linked_if_a_token_of_theirs_is():
    source, target = "un  heimlich gut .", "quite good ."
    source_tokens = [(0, 2), (2, 8), (8, 12), (12, 16), (16, 18)]  # un, heim|lich, gut, .
    target_tokens = [(0, 2), (2, 5), (5, 10), (10, 12)]  # qu|ite, good, .
    attention = torch.tensor(
        [
            [0.4, 0.3, 0.3, 0.0, 0.0],  # the two tokens of heimlich have more weight together than un
            [0.6, 0.1, 0.1, 0.2, 0.0],
            [0.0, 0.2, 0.2, 0.5, 0.1],
            [0.1, 0.0, 0.0, 0.2, 0.7],
        ]
    )
    links = word_links(attention, source, source_tokens, target, target_tokens)
    assert links == ((0, 0), (1, 0), (2, 1), (3, 2))
    assert pharaoh(links) == "0-0 1-0 2-1 3-2"
    assert word_links(attention, " ", [(0, 1)], target, target_tokens) == ()
    assert word_links(attention[:, :1], source, source_tokens, target, target_tokens) == ((0, 0), (0, 1), (0, 2))


@pytest.mark.parametrize(
    ("source", "target", "links"),
    [
        ("a , b", "x , y", ((1, 1), (2, 0), (2, 2))),
        (", a b", "x , y", ((0, 1), (1, 2), (2, 0))),
        ("a , b", "x ! y", ((1, 1), (2, 0), (2, 2))),
        ("a . b", ", , ,", ((1, 1), (1, 2), (2, 0))),
        (". . .", "x , y", ((1, 1), (1, 2), (2, 0))),
    ],
)
def test_words_are_linked_with_words_and_punctuation_with_itself(source, target, links):
    attention = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.6, 0.1], [0.1, 0.6, 0.3]])
    spans = [(0, 1), (1, 3), (3, 5)]
    assert word_links(attention, source, spans, target, spans) == links


UNUSUAL = ["a  dog\t\u00fcber \u65e5 the\u00a0 x \u2581 \u2581x", "\ufb01 dog  ", " \u2028dog", ""]
UNUSUAL += ["\U0001f469\u200d\U0001f469 dog\r"]


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
def test_token_spans_of_unusual_text_belong_to_their_words(normalization):
    tokenizer = train_tokenizer(["a dog runs over the green grass"] * 2, vocab_size=290, normalization=normalization)
    for text in UNUSUAL:
        ids, spans = tokenizer.encode(text), tokenizer.spans(text)
        assert len(spans) == len(ids)
        assert spans == sorted(spans)
        assert all(0 <= begin <= end <= len(text) for begin, end in spans)
        written, positions = tokenizer.decode(ids), tokenizer.decoded_spans(ids)
        assert "".join(written[begin:end] for begin, end in positions) == written
        links = word_links(torch.eye(len(ids)), text, spans, written, positions)
        if normalization == "identity":
            assert "".join(text[begin:end] for begin, end in spans) == text.strip(" ")
            assert links == tuple((word, word) for word in range(len(WORDS.findall(text))))
    broken = [4 + 0xC3, 4 + 0x41, 5]
    assert len(tokenizer.decoded_spans(broken)) == 3
