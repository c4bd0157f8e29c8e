"""Import of fairseq checkpoints: logits and translations equal those of a plain reimplementation."""

import dataclasses
import pickle
import shutil
import sys

import pytest
import sentencepiece
import torch
from fairseq_models import EOS, UNK, write
from model_dirs import tokenizer

from fasttfm.cli.main import main
from fasttfm.convert.exchange import load
from fasttfm.data.tokenizer import BOS
from fasttfm.data.tokenizer import EOS as OUR_EOS
from fasttfm.models import Transformer
from fasttfm.search import translate_ids
from fasttfm.translate import Translator
from fasttfm.translate.translator import one_line

from .their_folders import import_words

LINES = ["a dog runs", "zwei Männer sitzen", "the small green boat"]


def changed_checkpoint(folder, change):
    loaded = torch.load(folder / "checkpoint.pt", weights_only=False)
    change(loaded)
    torch.save(loaded, folder / "checkpoint.pt")


def words(folder, *more):
    return [*import_words("fairseq", folder, folder / "MODEL"), *more]


def imported(folder, *more):
    return main(words(folder, *more))


@pytest.mark.parametrize(
    ("shared", "pre", "new", "learned", "changes"),
    [
        ("all", False, True, (0, 0), {}),
        ("all", True, False, (0, 0), {}),
        ("decoder", False, False, (32, 24), {}),
        ("none", True, True, (0, 0), {"layers": (1, 3), "activation_fn": "gelu"}),
    ],
)
def test_the_same_logits_and_translations(tmp_path, capsys, shared, pre, new, learned, changes):
    reference, pieces = write(tmp_path, shared, pre, new, learned=learned, **changes)
    assert imported(tmp_path) == 0
    given, told = load(tmp_path / "MODEL"), capsys.readouterr().out
    assert ("left out the second copy of the encoder's matrices" in told) == new
    left_out = "left out the source's positions beyond the 24 that both sides have"
    assert (left_out in told) == (left_out in (tmp_path / "MODEL/README.md").read_text()) == any(learned)
    assert (given.config.positions, given.config.share_embeddings) == (24 if any(learned) else None, shared)
    model = Transformer(given.config)
    model.load_state_dict(given.weights, strict=False)
    model.eval()
    translator = Translator.from_directory(tmp_path / "MODEL", beam=1, max_len_a=0.0, max_len_b=20, workers=1)
    translations = translator.translate(LINES)
    assert len(set(translations)) > 1
    ours = [each.pieces(range(len(each))) for each in (given.source_tokenizer, given.target_tokenizer)]
    ids = [
        [side.index(piece, OUR_EOS + 1 if piece == "<s>" else 0) for piece in theirs]  # their <s> follows ours
        for side, theirs in zip(ours, pieces)
    ]
    decoding = dataclasses.replace(given.decoding, beam=1, max_len_b=20)
    spm = sentencepiece.SentencePieceProcessor(model_proto=tokenizer().model)
    numbers = {piece: number for number, piece in enumerate(pieces[0])}
    compared = [EOS, *range(UNK + 1, len(pieces[1]))]
    for line, translation in zip(LINES, translations, strict=True):
        source = torch.tensor([*(numbers.get(piece, UNK) for piece in spm.encode(line, out_type=str)), EOS])
        target = torch.tensor([EOS, *torch.randint(4, len(pieces[1]), (6,)).tolist()])
        mine = [ids[0][number] for number in source]
        with torch.no_grad():
            expected = reference(source, target)
            actual = model(torch.tensor([mine]), torch.tensor([[BOS, *(ids[1][number] for number in target[1:])]]))[0]
        torch.testing.assert_close(actual[:, ids[1]][:, compared], expected[:, compared], rtol=1e-4, atol=1e-4)
        (written,) = translate_ids(model, [mine], decoding)
        assert written == [ids[1][number] for number in reference.greedy(source, 20)]
        assert translation == one_line(given.target_tokenizer.decode(written))


def with_omegaconf(loaded):
    """A Namespace in a DictConfig."""
    omegaconf = pytest.importorskip("omegaconf")
    values = {"_name": None, "task": {"data": "x"}, "model": loaded["cfg"]["model"]}
    loaded["cfg"] = omegaconf.OmegaConf.create(values, flags={"allow_objects": True})


def with_sections(loaded):
    """Encoder and decoder as sections, which hydra makes."""
    sections = {}
    for name, value in vars(loaded["cfg"]["model"]).items():
        side, _, rest = name.partition("_")
        if side in ("encoder", "decoder"):
            sections.setdefault(side, {})[rest] = value
        else:
            sections[name] = value
    sections["decoder"]["ffn_embed_dim"] = "${model.encoder.ffn_embed_dim}"
    loaded["cfg"]["model"] = sections
    with_omegaconf(loaded)


def with_old_names(loaded):
    """Joint projections and numbered norms, as the published models of WMT14 and WMT16 have them."""
    weights = loaded["model"]
    for name in list(weights):
        if ".q_proj." in name:
            parts = [weights.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            weights[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        norms = ("self_attn", "final") if name.startswith("encoder.") else ("self_attn", "encoder_attn", "final")
        for number, norm in enumerate(norms):
            if f".{norm}_layer_norm." in name:
                weights[name.replace(f"{norm}_layer_norm", f"layer_norms.{number}")] = weights.pop(name)


@pytest.mark.parametrize("change", [with_omegaconf, with_sections, with_old_names])
def test_other_forms_of_a_checkpoint_are_read(tmp_path, monkeypatch, change):
    write(tmp_path, pre=True)
    assert imported(tmp_path) == 0
    expected = load(tmp_path / "MODEL")
    changed_checkpoint(tmp_path, change)
    shutil.rmtree(tmp_path / "MODEL")
    for name in [name for name in sys.modules if name.startswith("omegaconf")]:  # it is not needed
        monkeypatch.delitem(sys.modules, name)
    assert imported(tmp_path) == 0
    found = load(tmp_path / "MODEL")
    assert found.config == expected.config
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=0)


def test_unknown_settings_of_the_model_are_reported(tmp_path, capsys):
    write(tmp_path, encoder_mixing="sum", attention_heads_shared=2, adam_eps=1e-6, relu_dropout=0.25)
    assert imported(tmp_path) == 0
    assert "the settings attention_heads_shared 2, encoder_mixing sum are unknown: they" in capsys.readouterr().out
    assert load(tmp_path / "MODEL").config.relu_dropout == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_langtok": "src"}, "tokens of languages are not supported"),
        ({"encoder_learned_pos": True}, "encoder_learned_pos and decoder_learned_pos differ"),
        ({"encoder_layers": 3}, "have the layers encoder.layers.0, 1, where encoder_layers is 3"),
        ({"learned": (8, 8), "max_target_positions": 9}, "max_target_positions is 9"),
        ({"decoder_embed_dim": 64}, "encoder_embed_dim and decoder_embed_dim differ"),
        ({"decoder_normalize_before": True}, "normalize_before differ"),
        ({"activation_fn": "tanh"}, "activation_fn tanh"),
        ({"adaptive_softmax_cutoff": "10,20"}, "adaptive softmax"),
    ],
)
def test_unsupported_settings_are_named(tmp_path, refusal_of, changes, message):
    write(tmp_path, **changes)
    assert message in refusal_of(words(tmp_path))


def test_files_that_do_not_fit_are_named(tmp_path, refusal_of):
    write(tmp_path)
    source, target = tmp_path / "dict.src.txt", tmp_path / "dict.tgt.txt"
    given = source.read_text(encoding="utf-8")
    for pieces, message in (
        (["ein@@ ", "Hund", "e@@"], "67% of its tokens end in @@: it is of subword-nmt or fastBPE"),
        (["▁Bundestag", "▁Haushalt", "▁Wirtschaft"], "has the pieces of 0.0% of the tokens in"),
    ):  # a dictionary of another tokenizer
        lines = [*(f"{piece.strip()} 999999" for piece in pieces), *given.splitlines()[len(pieces) :]]
        for path in (source, target):
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert message in refusal_of(words(tmp_path))
        assert not (tmp_path / "MODEL").exists()
    source.write_text(given, encoding="utf-8")
    target.write_text("▁a 3\n▁b 2\n", encoding="utf-8")
    assert "has 6 pieces with the special ones" in refusal_of(words(tmp_path))
    target.write_text("▁a 3\nb\n", encoding="utf-8")
    assert "line 2 is not a piece with its count" in refusal_of(words(tmp_path))


class Code:
    def __reduce__(self):
        return (print, ("this was run",))


def test_no_code_of_a_checkpoint_is_run(tmp_path, capsys):
    write(tmp_path)
    path = tmp_path / "checkpoint.pt"
    for write_code in (
        lambda: torch.save({"model": {}, "args": Code()}, path),
        lambda: torch.save(Code(), path),
        lambda: path.write_bytes(pickle.dumps(Code())),
        path.unlink,
    ):
        write_code()
        assert imported(tmp_path) == 2
    told = capsys.readouterr()
    assert "this was run" not in told.out
    assert told.err.count("\n") == 4
