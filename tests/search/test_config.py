"""Decoding options that cannot mean anything are refused on construction."""

import pytest

from fasttfm.search import DecodingConfig
from fasttfm.search.hypotheses import length_penalty


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam": 0}, "beam 0 must be an integer of at least 1"),
        ({"beam": 2.5}, "beam 2.5 must be an integer"),
        ({"nbest": 5}, "nbest 5 is more than beam 4"),
        ({"length_penalty": "gnmt"}, "length_penalty 'gnmt' is unknown: choose wu, power, avg or none"),
        ({"alpha": -0.1}, "alpha -0.1"),
        ({"alpha": 1e300}, r"alpha 1e\+300 must be at most 30"),
        ({"alpha": float("nan")}, "alpha nan"),
        ({"coverage_penalty": -1.0}, "coverage_penalty -1.0 must be a finite number of at least 0"),
        ({"coverage_penalty": 1e300}, r"coverage_penalty 1e\+300 must be at most 1,000"),
        ({"diverse_beam_strength": 1001.0}, "diverse_beam_strength 1001.0 must be at most 1,000"),
        ({"diverse_beam_groups": 0}, "diverse_beam_groups 0 must be an integer of at least 1"),
        ({"diverse_beam_groups": 3}, "beam 4 must be a multiple of diverse_beam_groups 3"),
        ({"alignment_layer": -1}, "alignment_layer -1 must be an integer of at least 0"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"sampling_topp": 0.0}, "sampling_topp 0.0"),
        ({"sampling_topk": -1}, "sampling_topk -1"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram -1 must be an integer of at least 0"),
        ({"max_len_b": -1}, "max_len_b -1"),
        ({"max_len_a": 1e20}, r"max_len_a 1e\+20 must be at most 1,000"),
        ({"buffer_size": 0}, "buffer_size 0"),
        ({"beam": 4_097}, "beam 4097 must be at most 4,096"),
        ({"max_len_b": 10**30}, "max_len_b 10+ must be at most 1,000,000"),
        ({"min_len": 1_000_001}, "min_len 1000001 must be at most 1,000,000"),
        ({"sampling_seed": 1 << 63}, "sampling_seed 9223372036854775808 must be at most"),
    ],
)
def test_wrong_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**changes)


def test_sampling_may_return_more_than_beam():
    assert DecodingConfig(sampling=True, nbest=9).nbest == 9


def test_length_penalties_are_what_they_are_called():
    """wu, the paper's, is ((5 + length) / 6)^0.6, not length^0.6."""
    assert length_penalty(19, DecodingConfig(length_penalty="wu", alpha=0.6)) == pytest.approx(4.0**0.6)
    assert length_penalty(19, DecodingConfig()) == length_penalty(19, DecodingConfig(length_penalty="avg")) == 19.0
    assert length_penalty(19, DecodingConfig(length_penalty="none")) == 1.0
    assert length_penalty(1, DecodingConfig()) == 1.0


def test_the_longest_output_is_the_input_plus_50_by_default_and_a_number_that_tensors_can_hold():
    assert DecodingConfig().longest_output(7) == 57
    assert DecodingConfig(max_len_a=1.5, max_len_b=2).longest_output(7) == 12
    assert DecodingConfig(max_len_a=1_000.0).longest_output(1 << 22) == (1 << 31) - 1
