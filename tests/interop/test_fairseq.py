"""Checkpoints of fairseq's structure against a plain writing of fairseq's Transformer: logits and translations."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import pickle
import shutil
import sys
import types
import typing

import pytest
import torch
from model_dirs import tokenizer
from torch import nn

from fasttfm.cli.main import main
from fasttfm.data.tokenizer import BOS
from fasttfm.decoding import Translator, translate_ids
from fasttfm.decoding.translator import one_line
from fasttfm.interop.exchange import load
from fasttfm.models import Transformer

START, PAD, EOS, UNK = range(4)
WIDTH, HEADS, INNER, LAYERS = 32, 4, 48, 2
LINES = ["a dog runs", "zwei Männer sitzen", "the small green boat"]


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

        q, k, v = (
            heads(self.q_proj(x)) * (WIDTH // HEADS) ** -0.5,
            heads(self.k_proj(memory)),
            heads(self.v_proj(memory)),
        )
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
        self.fc1, self.fc2, self.final_layer_norm = (
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def add(self, x, norm, sublayer):
        return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))

    def forward(self, x, memory=None):
        x = self.add(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, causal=self.decoder))
        if self.decoder:
            x = self.add(x, self.encoder_attn_layer_norm, lambda y: self.encoder_attn(y, memory))
        return self.add(x, self.final_layer_norm, lambda y: self.fc2(self.fc1(y).relu()))


class Side(nn.Module):
    def __init__(self, size, pre, decoder):
        super().__init__()
        self.embed_tokens = nn.Embedding(size, WIDTH, PAD)
        self.layers = nn.ModuleList(Layer(pre, decoder) for _ in range(LAYERS))
        if pre:
            self.layer_norm = nn.LayerNorm(WIDTH)
        if decoder:
            self.output_projection = nn.Linear(WIDTH, size, bias=False)

    def forward(self, tokens, memory=None):
        x = self.embed_tokens(tokens) * WIDTH**0.5 + positions(len(tokens))
        for layer in self.layers:
            x = layer(x, memory)
        return self.layer_norm(x) if hasattr(self, "layer_norm") else x


class Reference(nn.Module):
    """One sentence at a time, without padding or dropout."""

    def __init__(self, sizes, pre, shared):
        super().__init__()
        self.encoder, self.decoder = Side(sizes[0], pre, False), Side(sizes[1], pre, True)
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


def write(folder, shared="all", pre=False, new=True, **changes):
    """checkpoint.pt, dict.*.txt and spm.model of a model, and what it should compute."""
    pieces = tokenizer().pieces(range(4, len(tokenizer())))
    orders = [pieces[::-1], pieces[::-1] if shared == "all" else pieces[5:] + pieces[:5] + ["madeupword0000"]]
    for name, order in zip(("src", "tgt"), orders):
        (folder / f"dict.{name}.txt").write_text("".join(f"{piece} {9}\n" for piece in order), encoding="utf-8")
    (folder / "spm.model").write_bytes(tokenizer().model)
    torch.manual_seed(3)
    model = Reference([len(order) + 4 for order in orders], pre, shared)
    sizes = {"embed_dim": WIDTH, "ffn_embed_dim": INNER, "attention_heads": HEADS, "normalize_before": pre}
    settings = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    settings |= {"arch": "transformer", "share_all_embeddings": shared == "all", "dropout": 0.3, **changes}
    weights = {**model.state_dict(), "encoder.version": torch.tensor([3.0])}
    weights["encoder.embed_positions._float_tensor"] = torch.full((1,), torch.nan)
    namespace = argparse.Namespace(**settings)
    torch.save(
        {
            "args": None if new else namespace,
            "cfg": {"_name": None, "model": namespace, "task": {"data": "x"}} if new else None,
            "model": weights,
            "optimizer_history": [{"num_updates": 7, "lr_scheduler_state": {"best": None}}],
            "extra_state": {"epoch": 1, "val_loss": 2.0},
        },
        folder / "checkpoint.pt",
    )
    return model.eval(), [["<s>", "<pad>", "</s>", "<unk>", *order] for order in orders]


def changed_checkpoint(folder, change):
    loaded = torch.load(folder / "checkpoint.pt", weights_only=False)
    change(loaded)
    torch.save(loaded, folder / "checkpoint.pt")


def imported(folder, *more):
    words = ["import", str(folder / "checkpoint.pt"), "--format", "fairseq", "--out", str(folder / "MODEL")]
    words += ["--dict", str(folder / "dict.src.txt"), "--dict", str(folder / "dict.tgt.txt")]
    return main([*words, "--spm", str(folder / "spm.model"), *more])


@pytest.mark.parametrize(
    ("shared", "pre", "new"),
    [("all", False, True), ("all", True, False), ("decoder", False, False), ("none", True, True)],
)
def test_the_same_logits_and_translations(tmp_path, shared, pre, new):
    reference, pieces = write(tmp_path, shared, pre, new)
    assert imported(tmp_path) == 0
    given = load(tmp_path / "MODEL")
    assert given.config.share_embeddings == shared
    model = Transformer(given.config)
    model.load_state_dict(given.weights, strict=False)
    model.eval()
    translator = Translator.from_directory(tmp_path / "MODEL", beam=1, max_len_a=0.0, max_len_b=20, workers=1)
    translations = translator.translate(LINES)
    decoding = dataclasses.replace(given.decoding, beam=1, max_len_b=20)
    assert len(set(translations)) > 1
    numbers = [{piece: number for number, piece in enumerate(side)} for side in pieces]
    ours = [given.source_tokenizer.pieces(range(len(pieces[0]))), given.target_tokenizer.pieces(range(len(pieces[1])))]
    indices = [[numbers[side].get(piece, UNK) for piece in ours[side]] for side in (0, 1)]
    import sentencepiece

    spm = sentencepiece.SentencePieceProcessor(model_proto=tokenizer().model)
    for line, translation in zip(LINES, translations):
        source = torch.tensor([numbers[0].get(piece, UNK) for piece in spm.encode(line, out_type=str)] + [EOS])
        target = torch.tensor([EOS, *torch.randint(4, len(pieces[1]), (6,)).tolist()])
        inverse = [{theirs: mine for mine, theirs in reversed(list(enumerate(side)))} for side in indices]
        mine = [torch.tensor([inverse[side][int(i)] for i in tokens]) for side, tokens in ((0, source), (1, target))]
        mine[1][0] = BOS
        with torch.no_grad():
            expected, actual = reference(source, target), model(mine[0][None], mine[1][None])[0]
        chosen = torch.tensor(
            [position for position in range(3, len(indices[1])) if ours[1][position] not in ("<s>", "<unk>")]
        )
        theirs = expected[:, torch.tensor(indices[1])[chosen]]
        torch.testing.assert_close(actual[:, chosen], theirs, rtol=1e-4, atol=1e-4)
        (written,) = translate_ids(model, [mine[0].tolist()], decoding)
        assert [indices[1][number] for number in written] == reference.greedy(source, 20)
        assert translation == one_line(given.target_tokenizer.decode(written))


def omegaconf_of_our_own(monkeypatch):
    """OmegaConf's classes as its pickles know them: a container has _content, a value _val."""
    made = {}
    monkeypatch.setitem(sys.modules, "omegaconf", types.ModuleType("omegaconf"))
    for module, name in (("dictconfig", "DictConfig"), ("nodes", "AnyNode"), ("base", "ContainerMetadata")):
        holder = types.ModuleType(f"omegaconf.{module}")
        made[name] = type(name, (), {"__module__": holder.__name__, "__qualname__": name})
        setattr(holder, name, made[name])
        monkeypatch.setitem(sys.modules, holder.__name__, holder)

    def create(value):
        thing = made["DictConfig" if isinstance(value, dict) else "AnyNode"]()
        thing._metadata, thing._parent = made["ContainerMetadata"](), None
        thing._metadata.ref_type, thing._metadata.resolver_cache = typing.Any, collections.defaultdict(dict)
        if isinstance(value, dict):
            thing._content = {name: create(each) for name, each in value.items()}
        else:
            thing._val = value
        return thing

    return create


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("writer", ["omegaconf", "our own"])
def test_settings_of_omegaconf_are_read(tmp_path, monkeypatch, writer, nested):
    """A Namespace in a DictConfig, and encoder and decoder as sections, which hydra makes."""
    if writer == "omegaconf":
        omegaconf = pytest.importorskip("omegaconf")

        def create(value):
            return omegaconf.OmegaConf.create(value, flags={"allow_objects": True})
    else:
        create = omegaconf_of_our_own(monkeypatch)
    write(tmp_path, pre=True)
    assert imported(tmp_path) == 0
    expected = load(tmp_path / "MODEL").config

    def change(loaded):
        given = vars(loaded["cfg"]["model"])
        sections = {}
        for name, value in given.items():
            side, _, rest = name.partition("_")
            if side in ("encoder", "decoder"):
                sections.setdefault(side, {})[rest] = value
            else:
                sections[name] = value
        sections["decoder"]["ffn_embed_dim"] = "${model.encoder.ffn_embed_dim}"
        model = sections if nested else loaded["cfg"]["model"]
        loaded["cfg"] = create({"_name": None, "task": {"data": "x"}, "model": model})

    changed_checkpoint(tmp_path, change)
    shutil.rmtree(tmp_path / "MODEL")
    for name in [name for name in sys.modules if name.startswith("omegaconf")]:
        monkeypatch.delitem(sys.modules, name)
    assert imported(tmp_path) == 0
    assert load(tmp_path / "MODEL").config == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder_langtok": "src"}, "tokens of languages are not supported"),
        ({"encoder_learned_pos": True}, "learned positions are not supported"),
        ({"decoder_embed_dim": 64}, "encoder_embed_dim and decoder_embed_dim differ"),
        ({"decoder_normalize_before": True}, "normalize_before differ"),
        ({"activation_fn": "tanh"}, "activation_fn tanh"),
        ({"adaptive_softmax_cutoff": "10,20"}, "adaptive softmax"),
    ],
)
def test_what_we_have_not_is_named(tmp_path, capsys, changes, words):
    write(tmp_path, **changes)
    assert imported(tmp_path) == 2
    assert words in capsys.readouterr().err


def test_learned_positions_are_found_among_the_weights(tmp_path, capsys):
    write(tmp_path)
    learned = {"encoder.embed_positions.weight": torch.randn(66, WIDTH)}
    changed_checkpoint(tmp_path, lambda loaded: loaded["model"].update(learned))
    assert imported(tmp_path) == 2
    assert "encoder.embed_positions.weight: learned positions are not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (["ein@@ ", "Hund", "e@@"], "67% of its tokens end in @@: it is of subword-nmt or fastBPE"),
        (["▁Bundestag", "▁Haushalt", "▁Wirtschaft"], "has the pieces of 0.0% of the tokens in"),
    ],
)
def test_a_dictionary_that_another_tokenizer_was_counted_for_is_refused(tmp_path, capsys, pieces, words):
    write(tmp_path)
    path = tmp_path / "dict.src.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    others = [f"{piece.strip()} 999999" for piece in pieces]
    path.write_text("\n".join([*others, *lines[len(others) :]]) + "\n", encoding="utf-8")
    (tmp_path / "dict.tgt.txt").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    assert imported(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tmp_path / "MODEL").exists()


class Code:
    def __reduce__(self):
        return (print, ("this was run",))


def test_no_code_of_a_checkpoint_is_run(tmp_path, capsys):
    write(tmp_path)
    for content in ({"model": {}, "args": Code()}, Code()):
        with (tmp_path / "checkpoint.pt").open("wb") as file:
            torch.save(content, file)
        assert imported(tmp_path) == 2
    (tmp_path / "checkpoint.pt").write_bytes(pickle.dumps(Code()))
    assert imported(tmp_path) == 2
    (tmp_path / "checkpoint.pt").unlink()
    assert imported(tmp_path) == 2
    told = capsys.readouterr()
    assert "this was run" not in told.out
    assert told.err.count("\n") == 4


def test_files_that_do_not_fit_are_named(tmp_path, capsys):
    write(tmp_path)
    (tmp_path / "dict.tgt.txt").write_text("▁a 3\n▁b 2\n")
    assert imported(tmp_path) == 2
    assert "has 6 pieces with the special ones" in capsys.readouterr().err
    (tmp_path / "dict.tgt.txt").write_text("▁a 3\nb\n")
    assert imported(tmp_path) == 2
    assert "line 2 is not a piece with its count" in capsys.readouterr().err
    assert imported(tmp_path, "--dict", "third") == 2
    assert "give one file for both sides" in capsys.readouterr().err
