"""The embedding kernels in the interpreter against the reference."""

import pytest
import torch
from accuracy import compare_with_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_fixtures import examples

from fasttfm import functional, reference
from fasttfm.functional.backends import backend
from fasttfm.kernels import embedding as kernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SEED = torch.tensor([0x1234567890ABCDEF])


def draw(batch, length, width, dtype, vocabulary=40, table=None, positions_dtype=None):
    generator = torch.Generator().manual_seed(batch * 100 + length * 10 + width)
    tokens = torch.randint(0, vocabulary, (batch, length), generator=generator)
    tokens[:, length // 2 :: 3] = 0
    inputs = {"weight": torch.randn(vocabulary, width, generator=generator).to(dtype)}
    if table:
        inputs["positions"] = torch.randn(table, width, generator=generator).to(positions_dtype or dtype)
    return tokens, inputs


def check(tokens, inputs, **options):
    options = {"scale": 5.5, "pad_id": 0, "seed": SEED, "site": 3, **options}

    def way(function):
        return lambda weight, positions=None: function(tokens, weight, positions, **options)

    compare_with_reference(way(functional.embed), way(reference.embed), inputs)


@settings(max_examples=examples(10))
@given(
    batch=st.sampled_from([1, 3, 5]),
    length=st.sampled_from([1, 4, 17]),
    width=st.sampled_from([1, 8, 17, 72, 130, 300]),
    dtype=st.sampled_from(DTYPES),
    dropout_p=st.sampled_from([0.0, 0.1, 0.5]),
    pad_id=st.sampled_from([None, 0, 7]),
    first_position=st.sampled_from([None, 0, 2]),
)
def test_output_and_gradients_equal_the_reference_for_any_shape(
    batch, length, width, dtype, dropout_p, pad_id, first_position
):
    table = None if first_position is None else length + 3
    tokens, inputs = draw(batch, length, width, dtype, table=table)
    check(tokens, inputs, dropout_p=dropout_p, pad_id=pad_id, first_position=first_position or 0)


def test_a_float32_table_of_positions_beside_bfloat16_weights():
    tokens, inputs = draw(3, 6, 72, torch.bfloat16, table=6, positions_dtype=torch.float32)
    check(tokens, inputs, dropout_p=0.2)


def test_rows_of_padding_are_zero_and_take_no_gradient_also_when_all_is_dropped_or_nothing():
    tokens, inputs = draw(2, 9, 24, torch.float32, table=9)
    for dropout_p in (0.0, 0.3, 1.0):
        weight, positions = inputs["weight"].clone().requires_grad_(), inputs["positions"]
        with backend("triton"):
            y = functional.embed(tokens, weight, positions, pad_id=0, dropout_p=dropout_p, seed=SEED)
            y.sum().backward()
        assert (y[tokens == 0] == 0).all()
        assert (weight.grad[0] == 0).all()
        assert (dropout_p == 1.0) == bool((weight.grad == 0).all())


@pytest.mark.parametrize("repeated", [1, 31, 32, 33, 200])
def test_the_gradient_of_a_repeated_token_is_the_sum_of_all_its_rows(repeated):
    tokens = torch.full((1, repeated + 2), 3)
    tokens[0, 0], tokens[0, -1] = 5, 1
    dy = torch.randn(1, repeated + 2, 70)
    actual = kernel.Gradient(dy, tokens, 7, scale=2.0)(dy, tokens)
    expected = torch.zeros(7, 70, dtype=torch.float64).index_add_(0, tokens[0], dy[0].double()) * 2
    assert torch.allclose(actual.double(), expected, atol=1e-4)
    assert (actual[[0, 2, 4, 6]] == 0).all()


def test_an_invalid_token_gives_nan_and_no_access_out_of_bounds():
    tokens = torch.tensor([[1, 40, -3, -1]])
    weight, dy = torch.randn(40, 16), torch.ones(1, 4, 16)
    y = kernel.Forward(tokens, weight, None)(tokens, weight, None)
    assert y.isnan().any(dim=2).tolist() == [[False, True, True, True]]
    assert kernel.Gradient(dy, tokens, 40)(dy, tokens).sum().item() == 16


@pytest.mark.parametrize("vocabulary", [1, 40, (1 << 15) - 1, 1 << 15, (1 << 16) - 1, 1 << 16, 100_000])
def test_runs_of_tokens_for_vocabularies_of_any_size(vocabulary):
    tokens = torch.randint(vocabulary, (3, 50))
    tokens[0, :4] = torch.tensor([0, vocabulary - 1, 0, vocabulary // 2])
    tokens[1, :2] = torch.tensor([-100, -1024])  # padding that is no token: in no run
    order, starts = kernel.runs(tokens, vocabulary)
    flat = tokens.flatten()
    assert torch.equal(order[starts[0] : starts[-1]], flat.argsort(stable=True)[2:])
    assert torch.equal(starts.diff(), flat[flat >= 0].bincount(minlength=vocabulary))


def test_inputs_need_not_be_contiguous():
    tokens, inputs = draw(6, 5, 24, torch.float32)
    weight = inputs["weight"].t().contiguous().t()
    with backend("triton"):
        actual = functional.embed(tokens.t(), weight, None, scale=2.0)
    assert torch.equal(actual, reference.embed(tokens.t(), weight, None, scale=2.0))
