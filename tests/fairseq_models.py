"""A plain reimplementation of fairseq's Transformer, and checkpoints in fairseq's format."""

import argparse
import math

import torch
from model_dirs import tokenizer
from torch import nn

START, PAD, EOS, UNK = range(4)
WIDTH, HEADS, INNER, LAYERS = 32, 4, 48, 2


def positions(length):
    """fairseq/modules/sinusoidal_positional_embedding.py: all sines first, the first position is PAD + 1."""
    half = WIDTH // 2
    rates = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(PAD + 1, PAD + 1 + length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x, memory, causal=False):
        def heads(y):
            return y.view(len(y), HEADS, -1).transpose(0, 1)

        q = heads(self.q_proj(x)) * (WIDTH // HEADS) ** -0.5
        k, v = heads(self.k_proj(memory)), heads(self.v_proj(memory))
        scores = q @ k.transpose(1, 2)
        if causal:
            scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
        return self.out_proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), WIDTH))


class Layer(nn.Module):
    def __init__(self, pre, decoder, activation):
        super().__init__()
        self.pre, self.decoder, self.activation = pre, decoder, activation
        self.self_attn, self.self_attn_layer_norm = Attention(), nn.LayerNorm(WIDTH)
        if decoder:
            self.encoder_attn, self.encoder_attn_layer_norm = Attention(), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def add(self, x, norm, sublayer):
        return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))

    def forward(self, x, memory=None):
        x = self.add(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, causal=self.decoder))
        if self.decoder:
            x = self.add(x, self.encoder_attn_layer_norm, lambda y: self.encoder_attn(y, memory))
        return self.add(x, self.final_layer_norm, lambda y: self.fc2(self.activation(self.fc1(y))))


class Side(nn.Module):
    def __init__(self, size, pre, decoder, learned, layers, activation):
        super().__init__()
        if learned:  # fairseq/modules/positional_embedding.py
            self.embed_positions = nn.Embedding(learned + PAD + 1, WIDTH, PAD)
        self.embed_tokens = nn.Embedding(size, WIDTH, PAD)
        self.layers = nn.ModuleList(Layer(pre, decoder, activation) for _ in range(layers))
        if pre:
            self.layer_norm = nn.LayerNorm(WIDTH)
        if decoder:
            self.output_projection = nn.Linear(WIDTH, size, bias=False)

    def forward(self, tokens, memory=None):
        if hasattr(self, "embed_positions"):  # fairseq/modules/learned_positional_embedding.py
            places = self.embed_positions(torch.arange(PAD + 1, PAD + 1 + len(tokens)))
        else:
            places = positions(len(tokens))
        x = self.embed_tokens(tokens) * WIDTH**0.5 + places
        for layer in self.layers:
            x = layer(x, memory)
        return self.layer_norm(x) if hasattr(self, "layer_norm") else x


class Reference(nn.Module):
    """One sentence at a time, without padding or dropout."""

    def __init__(self, sizes, pre, shared, learned, layers, activation):
        super().__init__()
        self.encoder, self.decoder = (
            Side(sizes[side], pre, bool(side), learned[side], layers[side], activation) for side in (0, 1)
        )
        for layer in self.modules():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.normal_(layer.weight, std=0.5)  # or the likeliest token is the one before
        if shared == "all":
            self.encoder.embed_tokens = self.decoder.embed_tokens
        for side in (self.encoder, self.decoder):
            nn.init.normal_(side.embed_tokens.weight, std=0.3)
            side.embed_tokens.weight.data[PAD] = 0
        if shared != "none":
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight

    def forward(self, source, target):
        return self.decoder.output_projection(self.decoder(target, self.encoder(source)))

    @torch.no_grad()
    def greedy(self, source, longest):
        target = [EOS]
        while len(target) <= longest:
            logits = self(source, torch.tensor(target))[-1]
            logits[PAD] = -torch.inf
            target.append(int(logits.argmax()))
            if target[-1] == EOS:
                return target[1:-1]
        return target[1:]


def write(
    folder, shared="all", pre=False, new=True, pieces=None, learned=(0, 0), layers=(LAYERS, LAYERS), **changes
):  # fmt: skip
    """Write checkpoint.pt, dict.*.txt and spm.model; returns the Reference and the pieces of both dictionaries.

    pieces: of another tokenizer than the SentencePiece model. learned: number of learned positions of source and
    target; 0: sinusoids. changes: of the settings; activation_fn may be gelu.
    """
    pieces = pieces or tokenizer().pieces(range(4, len(tokenizer())))
    orders = [pieces[::-1], pieces[::-1] if shared == "all" else pieces[5:] + pieces[:5] + ["madeupword0000"]]
    for name, order in zip(("src", "tgt"), orders):
        (folder / f"dict.{name}.txt").write_text("".join(f"{piece} {9}\n" for piece in order), encoding="utf-8")
    (folder / "spm.model").write_bytes(tokenizer().model)
    torch.manual_seed(3)
    activation = nn.functional.gelu if changes.get("activation_fn") == "gelu" else torch.relu
    model = Reference([len(order) + 4 for order in orders], pre, shared, learned, layers, activation)
    sizes = {"embed_dim": WIDTH, "ffn_embed_dim": INNER, "attention_heads": HEADS, "normalize_before": pre}
    settings = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    settings |= {"arch": "transformer", "share_all_embeddings": shared == "all", "dropout": 0.3, **changes}
    weights = {**model.state_dict(), **{f"{side}.version": torch.tensor([3.0]) for side in ("encoder", "decoder")}}
    if new:  # fairseq/modules/transformer_layer.py of 0.12: buffers of its fast path
        shapes = {"in_proj": (3 * WIDTH, WIDTH), "out_proj": (WIDTH, WIDTH), "fc1": (INNER, WIDTH),
                  "fc2": (WIDTH, INNER)}  # fmt: skip
        for name, shape in shapes.items():
            for number in range(layers[0]):
                weights[f"encoder.layers.{number}.{name}_weight"] = torch.zeros(shape)
                weights[f"encoder.layers.{number}.{name}_bias"] = torch.zeros(shape[0])
    if any(learned):
        flags = dict.fromkeys(("encoder_learned_pos", "decoder_learned_pos"), True)
        settings = {"max_source_positions": learned[0], "max_target_positions": learned[1], **flags, **settings}
    else:
        weights |= {
            f"{side}.embed_positions._float_tensor": torch.full((1,), torch.nan) for side in ("encoder", "decoder")
        }
    namespace = argparse.Namespace(**settings)
    torch.save(
        {
            "args": None if new else namespace,
            "cfg": {"_name": None, "model": namespace, "task": {"data": "x"}} if new else None,
            "model": weights,
            # fairseq/trainer.py, state_dict()
            "criterion": None,
            "optimizer_history": [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {"best": None}}],
            "extra_state": {"metrics": {}, "epoch": 1, "val_loss": 2.0},
            "last_optimizer_state": {"state": {}, "param_groups": [{"lr": 0.0005, "betas": (0.9, 0.98)}]},
        },
        folder / "checkpoint.pt",
    )
    return model.eval(), [["<s>", "<pad>", "</s>", "<unk>", *order] for order in orders]
