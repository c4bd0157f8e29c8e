"""DecodingConfig refuses invalid values on construction."""

import pytest

from fasttfm.search import DecodingConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam": 0}, "beam 0 must be an integer of at least 1"),
        ({"nbest": 5}, "nbest 5 is more than beam 4"),
        ({"length_penalty": "gnmt"}, "length_penalty 'gnmt' is unknown: choose wu, power, avg or none"),
        ({"alpha": float("nan")}, "alpha nan"),
        ({"coverage_penalty": -1.0}, "coverage_penalty -1.0 must be a finite number of at least 0"),
        ({"diverse_beam_groups": 3}, "beam 4 must be a multiple of diverse_beam_groups 3"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram -1 must be an integer of at least 0"),
        ({"max_len_a": 1e20}, r"max_len_a 1e\+20 must be at most 1,000"),
        ({"beam": 4_097}, "beam 4097 must be at most 4,096"),
        ({"max_len_b": 10**30}, "max_len_b 10+ must be at most 1,000,000"),
        ({"mbr_samples": 1}, "mbr_samples 1 must be 0, or at least 2"),
        ({"sampling_seed": 1 << 63}, "sampling_seed 9223372036854775808 must be at most"),
    ],
)
def test_invalid_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**changes)


def test_the_longest_output_is_the_input_plus_50_by_default_and_fits_tensors():
    assert DecodingConfig(sampling=True, nbest=9).longest_output(7) == 57  # samples may be more than beam
    assert DecodingConfig(max_len_a=1.5, max_len_b=2).longest_output(7) == 12
    assert DecodingConfig(max_len_a=1_000.0).longest_output(1 << 22) == (1 << 31) - 1
