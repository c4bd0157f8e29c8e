"""A new architecture is one file over the blocks: a causal language model, also with one layer shared by all depths."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from separate_launches import separate_launches
from torch import nn

from fasttfm.blocks.cache import DecoderCache
from fasttfm.functional import backend
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.models import TransformerConfig

from .decoder_only import LanguageModel


def tiny(share_layers=False, **changes) -> LanguageModel:
    torch.manual_seed(0)
    fields = {"vocab_size": 31, "d_model": 16, "heads": 2, "d_ff": 24, "decoder_layers": 3, "dropout": 0.0}
    fields |= {"norm_first": True, "final_norm": True, "activation": "gelu", "max_length": 16}
    model = LanguageModel(TransformerConfig(**{**fields, **changes}), share_layers=share_layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(*shape: int):
    return torch.randint(4, 31, shape, generator=torch.Generator().manual_seed(1))


def gradients(model, route="torch"):
    model.zero_grad()
    torch.manual_seed(2)
    with backend(route):
        model.loss(tokens(3, 7), torch.tensor([7, 5, 3]))[0].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_it_takes_less_than_120_lines():
    assert len((Path(__file__).parent / "decoder_only.py").read_text().splitlines()) < 120


@pytest.mark.parametrize("norm_first", [False, True])
def test_it_computes_what_torch_nn_does_with_a_causal_mask(norm_first):
    model = tiny(norm_first=norm_first, final_norm=norm_first).double()
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    twin = nn.TransformerEncoder(layer, 3, nn.LayerNorm(16) if norm_first else None).double()
    twin.load_state_dict({k[8:]: v for k, v in model.state_dict().items() if k.startswith("decoder.")})
    x = tokens(2, 6)
    embedded = model.embedding(x) * 4.0 + model.positions.table[:6]
    wanted = twin(embedded, mask=nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64))
    torch.testing.assert_close(model(x), wanted @ model.output.weight.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("share_layers", [False, True])
@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1, 1), (4, 1, 1), (2, 3, 1)])
def test_steps_with_a_cache_give_the_full_pass(pieces, share_layers):
    model = tiny(share_layers).double().eval()
    x = tokens(2, 6)
    full, cache, end = model(x), DecoderCache(16), 0
    for piece in x.split(list(pieces), 1):
        end += piece.shape[1]
        torch.testing.assert_close(model.step(piece, cache), full[:, end - 1])
    cache.reorder(torch.tensor([1, 1, 0]))
    repeated = torch.cat([x[[1, 1, 0]], tokens(3, 1)], 1)
    torch.testing.assert_close(model.step(repeated[:, 6:], cache), model(repeated)[:, 6])


@pytest.mark.sample(1)
@pytest.mark.parametrize("share_layers", [False, True])
def test_merged_launches_change_no_gradient_and_are_fewer(share_layers):
    model = tiny(share_layers, activation="relu")
    actual, plain = gradients(model, "triton"), gradients(model, "torch")
    counts = []
    for launches in (nullcontext, separate_launches):
        with launches(), LaunchLog() as log:
            wanted = gradients(model, "triton")
        counts.append(log.total)
        for name, gradient in wanted.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-4, msg=name)
            torch.testing.assert_close(plain[name], gradient, rtol=1e-4, atol=1e-4, msg=name)
    assert counts[0] < counts[1]


def test_layers_that_share_parameters_share_no_mask():
    model = tiny(True, dropout=0.5, decoder_layers=2)
    seen = []
    layer = model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda _, inputs, options: seen.append(options["now"]), with_kwargs=True)
    model.loss(tokens(2, 5))
    assert len(seen) == 2
    assert seen[0].seed is seen[1].seed
    assert seen[0].first_site != seen[1].first_site
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in tiny(decoder_layers=2).parameters())
