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
    def __init__(self, pre, decoder):
        super().__init__()
        self.pre, self.decoder = pre, decoder
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
        return self.add(x, self.final_layer_norm, lambda y: self.fc2(self.fc1(y).relu()))


class Side(nn.Module):
    def __init__(self, size, pre, decoder, learned=0):
        super().__init__()
        if learned:  # fairseq/modules/positional_embedding.py
            self.embed_positions = nn.Embedding(learned + PAD + 1, WIDTH, PAD)
        self.embed_tokens = nn.Embedding(size, WIDTH, PAD)
        self.layers = nn.ModuleList(Layer(pre, decoder) for _ in range(LAYERS))
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

    def __init__(self, sizes, pre, shared, learned=(0, 0)):
        super().__init__()
        self.encoder, self.decoder = Side(sizes[0], pre, False, learned[0]), Side(sizes[1], pre, True, learned[1])
        for layer in self.modules():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.normal_(layer.weight, std=0.5)  # or the likeliest token is the one before
        nn.init.normal_(self.encoder.embed_tokens.weight, std=0.3)
        nn.init.normal_(self.decoder.embed_tokens.weight, std=0.3)
        if shared == "all":
            self.encoder.embed_tokens = self.decoder.embed_tokens
        if shared != "none":
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight
        for side in (self.encoder, self.decoder):
            side.embed_tokens.weight.data[PAD] = 0

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


def write(folder, shared="all", pre=False, new=True, pieces=None, learned=(0, 0), **changes):
    """Write checkpoint.pt, dict.*.txt and spm.model; returns the Reference and the pieces of both dictionaries.

    pieces: of another tokenizer than the SentencePiece model. learned: number of learned positions of source and
    target; 0: sinusoids.
    """
    pieces = pieces or tokenizer().pieces(range(4, len(tokenizer())))
    orders = [pieces[::-1], pieces[::-1] if shared == "all" else pieces[5:] + pieces[:5] + ["madeupword0000"]]
    for name, order in zip(("src", "tgt"), orders):
        (folder / f"dict.{name}.txt").write_text("".join(f"{piece} {9}\n" for piece in order), encoding="utf-8")
    (folder / "spm.model").write_bytes(tokenizer().model)
    torch.manual_seed(3)
    model = Reference([len(order) + 4 for order in orders], pre, shared, learned)
    sizes = {"embed_dim": WIDTH, "ffn_embed_dim": INNER, "attention_heads": HEADS, "normalize_before": pre}
    settings = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    settings |= {"arch": "transformer", "share_all_embeddings": shared == "all", "dropout": 0.3, **changes}
    weights = {**model.state_dict(), **{f"{side}.version": torch.tensor([3.0]) for side in ("encoder", "decoder")}}
    if new:  # fairseq/modules/transformer_layer.py of 0.12: buffers of its fast path
        shapes = (("in_proj", 3 * WIDTH, WIDTH), ("out_proj", WIDTH, WIDTH))
        shapes += (("fc1", INNER, WIDTH), ("fc2", WIDTH, INNER))
        for name, rows, columns in shapes:
            for number in range(LAYERS):
                weights[f"encoder.layers.{number}.{name}_weight"] = torch.zeros(rows, columns)
                weights[f"encoder.layers.{number}.{name}_bias"] = torch.zeros(rows)
    if any(learned):
        for side, most in zip(("source", "target"), learned):
            flag = f"{'en' if side == 'source' else 'de'}coder_learned_pos"
            settings = {f"max_{side}_positions": most, flag: True, **settings}
    else:
        weights |= {
            f"{side}.embed_positions._float_tensor": torch.full((1,), torch.nan) for side in ("encoder", "decoder")
        }
    namespace = argparse.Namespace(**settings)
    history = {"criterion_name": "LabelSmoothedCrossEntropyCriterion", "optimizer_name": "FairseqAdam"}
    history |= {"lr_scheduler_state": {"best": None}, "num_updates": 7}
    torch.save(
        {
            "args": None if new else namespace,
            "cfg": {"_name": None, "model": namespace, "task": {"data": "x"}} if new else None,
            "model": weights,
            # fairseq/trainer.py, state_dict()
            "criterion": None,
            "optimizer_history": [history],
            "task_state": {},
            "extra_state": {"metrics": {}, "previous_training_time": 1.5, "epoch": 1, "val_loss": 2.0},
            "last_optimizer_state": {"state": {}, "param_groups": [{"lr": 0.0005, "betas": (0.9, 0.98)}]},
        },
        folder / "checkpoint.pt",
    )
    return model.eval(), [["<s>", "<pad>", "</s>", "<unk>", *order] for order in orders]
