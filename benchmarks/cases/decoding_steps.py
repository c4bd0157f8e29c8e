"""Searches that keep less than fasttfm's does: what each of the source document's reuse steps is worth.

"Transformer Details Not Described in The Paper" counts two steps, the encoder run once a sentence (1.33x there) and the
cross-attention's keys and values computed once (1.42x), and names two more: never computing earlier targets again, and
never computing the masked half of the scores. Less stands for a model in the product's own searches, so a rung differs
from the next in that one thing: the operators, the search and the vocabulary (of the newest token alone) are the same.
Nothing here is of use to anybody but the benchmark.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.cpu.linear import linear
from fasttfm.models import Transformer

RUNGS = {
    "nothing kept": {"encoder": False, "cross": False, "self_attention": False},
    "encoder kept": {"encoder": True, "cross": False, "self_attention": False},
    "encoder and cross K, V kept": {"encoder": True, "cross": True, "self_attention": False},
    "all kept, masked keys computed": {"encoder": True, "cross": True, "self_attention": True},
}
"""Provider -> what it keeps; fasttfm is the rung above, which leaves out the masked keys as well."""


@dataclass(slots=True)
class State:
    """Values kept between two tokens: B sentences, R rows, row = sentence * (R / B) + k."""

    memory: Tensor
    """(B, S, d) the encoder's output, or (B, S) the sources themselves."""
    lengths: Tensor | None
    """(B,) of the sources, None without padding."""
    targets: Tensor
    """(R, L) tokens read so far."""
    capacity: int
    cross: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Per layer keys and values (B, H, S, D), where they are kept."""
    self_attention: list[Tensor] = field(default_factory=list)
    """Per layer keys and values (2, R, H, capacity, D), where they are kept."""

    def reorder(self, rows: Tensor) -> None:
        """Row r goes on from old row rows[r]."""
        self.targets = self.targets[rows]
        self.self_attention = [each[:, rows] for each in self.self_attention]

    def keep(self, sentences: Tensor) -> None:
        """Drops the other sentences."""
        beam = len(self.targets) // len(self.memory)
        self.memory = self.memory[sentences]
        self.lengths = None if self.lengths is None else self.lengths[sentences]
        self.cross = [(key[sentences], value[sentences]) for key, value in self.cross]
        self.reorder((sentences[:, None] * beam + torch.arange(beam, device=sentences.device)).flatten())


class Less(nn.Module):
    """A post-norm Transformer that keeps what it is told to between two tokens, for fasttfm.decoding's searches."""

    def __init__(self, model: Transformer, *, encoder: bool, cross: bool, self_attention: bool) -> None:
        super().__init__()
        if model.config.norm_first:
            raise ValueError("only the paper's post-norm model is written here")
        self.model = model
        self.config = model.config
        self.weights = dict(model.state_dict())
        self.keep_encoder, self.keep_cross, self.keep_self_attention = encoder, cross, self_attention

    def encode(self, source: Tensor, lengths: Tensor | None) -> Tensor:
        """The encoder's output, or the source where it is encoded anew for every token."""
        return self.model.encode(source, lengths) if self.keep_encoder else source

    def start_cache(self, memory: Tensor, lengths: Tensor | None, *, rows_per_sentence: int, max_length: int) -> State:
        """The cache that TransformerDecoder.start_cache() makes."""
        rows = len(memory) * rows_per_sentence
        state = State(memory, lengths, torch.empty(rows, 0, dtype=torch.int64, device=memory.device), max_length)
        layers = range(self.config.decoder_layers)
        if self.keep_cross:
            state.cross = [self._cross(layer, memory) for layer in layers]
        if self.keep_self_attention:
            head = (self.config.heads, max_length, self.config.d_model // self.config.heads)
            state.self_attention = [memory.new_zeros(2, rows, *head) for _ in layers]
        return state

    def step(self, tokens: Tensor, state: State) -> Tensor:
        """Logits (R, V) float32 for the token after tokens (R,)."""
        state.targets = torch.cat([state.targets, tokens[:, None]], dim=1)
        memory = state.memory if self.keep_encoder else self.model.encode(state.memory, state.lengths)
        first = state.targets.shape[1] - 1 if self.keep_self_attention else 0
        x = F.embed(
            state.targets[:, first:],
            self.weights["target_embedding.weight"],
            self.model.positions.table,
            scale=self.config.d_model**0.5,
            pad_id=self.config.pad_id,
            first_position=first,
        )  # (R, L, d)
        for layer in range(self.config.decoder_layers):
            x = self._layer(layer, x, memory, state)
        return linear(x[:, -1], self.weights["output.weight"]).float()

    def _project(self, x: Tensor, name: str, part: slice = slice(None)) -> tuple[Tensor, ...]:
        """Parts (B, H, L, D) of a projection of x (B, L, d)."""
        y = linear(x, self.weights[name + ".in_proj_weight"][part], self.weights[name + ".in_proj_bias"][part])
        return (
            y.view(*x.shape[:2], -1, self.config.heads, x.shape[2] // self.config.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )

    def _cross(self, layer: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        key, value = self._project(memory, f"decoder.layers.{layer}.multihead_attn", slice(self.config.d_model, None))
        return key, value

    def _layer(self, layer: int, x: Tensor, memory: Tensor, state: State) -> Tensor:
        name = f"decoder.layers.{layer}."
        query, key, value = self._project(x, name + "self_attn")
        if self.keep_self_attention:
            position, kept = state.targets.shape[1] - 1, state.self_attention[layer]
            kept[0, :, :, position], kept[1, :, :, position] = key[:, :, 0], value[:, :, 0]
            seen = torch.full((len(x),), position + 1, device=x.device)
            heads = F.attention(query, kept[0], kept[1], key_lengths=seen)
        else:
            heads = F.attention(query, key, value, causal=True)
        x = self._add(heads, x, name + "self_attn", name + "norm1")
        key, value = state.cross[layer] if self.keep_cross else self._cross(layer, memory)
        together = x.view(len(memory), -1, x.shape[2])  # the rows of a sentence are its queries
        (query,) = self._project(together, name + "multihead_attn", slice(0, self.config.d_model))
        heads = F.attention(query, key, value, key_lengths=state.lengths)
        x = self._add(heads, together, name + "multihead_attn", name + "norm2").view(x.shape)
        hidden = linear(x, self.weights[name + "linear1.weight"], self.weights[name + "linear1.bias"], relu=True)
        output = linear(hidden, self.weights[name + "linear2.weight"], self.weights[name + "linear2.bias"])
        return self._norm(output, x, name + "norm3")

    def _add(self, heads: Tensor, x: Tensor, attention: str, norm: str) -> Tensor:
        weight, bias = self.weights[attention + ".out_proj.weight"], self.weights[attention + ".out_proj.bias"]
        return self._norm(linear(heads.transpose(1, 2).flatten(2), weight, bias), x, norm)

    def _norm(self, output: Tensor, x: Tensor, name: str) -> Tensor:
        eps = self.config.layer_norm_eps
        return F.residual_layer_norm(output, x, self.weights[name + ".weight"], self.weights[name + ".bias"], eps)[0]
