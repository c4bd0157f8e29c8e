"""An encoder alone (BERT's shape), and one whose depths share their parameters (ALBERT's), over the same blocks."""

import pytest
import torch
from torch import nn

from fasttfm.blocks.embedding import Sinusoids, embed
from fasttfm.functional.dropout import NO_DROPOUT
from fasttfm.models import TransformerConfig
from fasttfm.models.layers import EncoderLayer, Stack

CONFIG = TransformerConfig(vocab_size=31, d_model=16, heads=2, d_ff=24, dropout=0.0, activation="gelu", max_length=16)


class Encoder(nn.Module):
    """Tokens to hidden states, padding told by lengths."""

    def __init__(self, depth: int, *, share_layers: bool) -> None:
        super().__init__()
        one = EncoderLayer(CONFIG)
        self.embedding = nn.Embedding(CONFIG.vocab_size, CONFIG.d_model)
        self.positions = Sinusoids(CONFIG.max_length, CONFIG.d_model)
        self.encoder = Stack(
            [one] * depth if share_layers else [one, *(EncoderLayer(CONFIG) for _ in range(depth - 1))]
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, tokens, lengths=None):
        return self.encoder(embed(tokens, self.embedding, self.positions, pad_id=0, dropout=NO_DROPOUT), lengths)


@pytest.mark.parametrize("share_layers", [False, True])
def test_it_computes_what_torch_nn_does(share_layers):
    torch.manual_seed(0)
    model = Encoder(3, share_layers=share_layers).double()
    tokens, lengths = torch.randint(4, 31, (3, 6)), torch.tensor([6, 2, 4])
    padding = torch.arange(6) >= lengths[:, None]
    tokens[padding] = 0
    x = (model.embedding(tokens) * 4.0 + model.positions.table[:6]).masked_fill(padding[..., None], 0.0)
    for number in range(3):
        twin = nn.TransformerEncoderLayer(16, 2, 24, 0.0, "gelu", batch_first=True).double()
        twin.load_state_dict(model.encoder.layers[number].state_dict())
        x = twin(x, src_key_padding_mask=padding)
    torch.testing.assert_close(model(tokens, lengths)[~padding], x[~padding])


def test_shared_layers_count_once_and_take_the_gradient_of_every_depth():
    torch.manual_seed(0)
    shared, alone = Encoder(3, share_layers=True), Encoder(1, share_layers=True)
    assert sum(p.numel() for p in shared.parameters()) == sum(p.numel() for p in alone.parameters())
    weight = shared.encoder.layers[0].linear1.weight
    assert weight is shared.encoder.layers[2].linear1.weight
    shared(torch.randint(4, 31, (2, 5))).square().sum().backward()
    assert weight.grad.abs().sum() > 0
