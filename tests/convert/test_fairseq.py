"""Import of fairseq checkpoints: logits and translations equal those of a plain reimplementation."""

import dataclasses
import pickle
import re
import shutil
import sys

import pytest
import torch
from fairseq_models import EOS, UNK, WIDTH, write
from model_dirs import tokenizer

from fasttfm.cli.main import main
from fasttfm.convert.exchange import load
from fasttfm.data.tokenizer import BOS
from fasttfm.models import Transformer
from fasttfm.search import translate_ids
from fasttfm.translate import Translator
from fasttfm.translate.translator import one_line

from .test_spoiled_folders import import_words

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
    ("shared", "pre", "new", "learned"),
    [
        ("all", False, True, (0, 0)),
        ("all", True, False, (0, 0)),
        ("decoder", False, False, (32, 24)),
        ("none", True, True, (0, 0)),
    ],
)
def test_the_same_logits_and_translations(tmp_path, capsys, shared, pre, new, learned):
    reference, pieces = write(tmp_path, shared, pre, new, learned=learned)
    assert imported(tmp_path) == 0
    given = load(tmp_path / "MODEL")
    assert given.config.positions == (24 if any(learned) else None)
    told = "note: left out the source's positions beyond the 24 that both sides have"
    assert (told in capsys.readouterr().out) == any(learned)
    assert (told.removeprefix("note: ") in (tmp_path / "MODEL" / "README.md").read_text()) == any(learned)
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
    for line, translation in zip(LINES, translations, strict=True):
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


@pytest.mark.parametrize("nested", [False, True])
def test_settings_of_omegaconf_are_read(tmp_path, monkeypatch, nested):
    """A Namespace in a DictConfig, and encoder and decoder as sections, which hydra makes."""
    omegaconf = pytest.importorskip("omegaconf")
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
        values = {"_name": None, "task": {"data": "x"}, "model": model}
        loaded["cfg"] = omegaconf.OmegaConf.create(values, flags={"allow_objects": True})

    changed_checkpoint(tmp_path, change)
    shutil.rmtree(tmp_path / "MODEL")
    for name in [name for name in sys.modules if name.startswith("omegaconf")]:
        monkeypatch.delitem(sys.modules, name)
    assert imported(tmp_path) == 0
    assert load(tmp_path / "MODEL").config == expected


def test_names_of_old_checkpoints_are_read(tmp_path):
    """Joint projections and numbered norms, as the published models of WMT14 and WMT16 have them."""
    write(tmp_path)
    assert imported(tmp_path) == 0
    expected = load(tmp_path / "MODEL").weights

    def rename(loaded):
        weights = loaded["model"]
        for name in list(weights):
            if ".q_proj." in name:
                parts = [weights.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
                weights[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
            elif name.startswith("decoder.") and "_layer_norm." in name:
                for number, norm in enumerate(("self_attn", "encoder_attn", "final")):
                    if f".{norm}_layer_norm." in name:
                        weights[name.replace(f"{norm}_layer_norm", f"layer_norms.{number}")] = weights.pop(name)
            elif name.startswith("encoder.") and "_layer_norm." in name:
                number = int("final" in name)
                weights[re.sub(r"\w+_layer_norm", f"layer_norms.{number}", name)] = weights.pop(name)

    changed_checkpoint(tmp_path, rename)
    shutil.rmtree(tmp_path / "MODEL")
    assert imported(tmp_path) == 0
    found = load(tmp_path / "MODEL").weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


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


def test_unknown_settings_of_the_model_are_reported(tmp_path, capsys):
    write(tmp_path, encoder_mixing="sum", attention_heads_shared=2, adam_eps=1e-6, relu_dropout=0.25)
    assert imported(tmp_path) == 0
    assert "the settings attention_heads_shared 2, encoder_mixing sum are unknown: they" in capsys.readouterr().out
    assert load(tmp_path / "MODEL").config.relu_dropout == 0.25


def test_learned_positions_without_the_setting_are_refused(tmp_path, refusal_of):
    write(tmp_path)
    learned = {"encoder.embed_positions.weight": torch.randn(66, WIDTH)}
    changed_checkpoint(tmp_path, lambda loaded: loaded["model"].update(learned))
    assert "has the weights encoder.embed_positions.weight, for which" in refusal_of(words(tmp_path))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (["ein@@ ", "Hund", "e@@"], "67% of its tokens end in @@: it is of subword-nmt or fastBPE"),
        (["▁Bundestag", "▁Haushalt", "▁Wirtschaft"], "has the pieces of 0.0% of the tokens in"),
    ],
)
def test_a_dictionary_of_another_tokenizer_is_refused(tmp_path, refusal_of, pieces, message):
    write(tmp_path)
    path = tmp_path / "dict.src.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    others = [f"{piece.strip()} 999999" for piece in pieces]
    path.write_text("\n".join([*others, *lines[len(others) :]]) + "\n", encoding="utf-8")
    (tmp_path / "dict.tgt.txt").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    assert message in refusal_of(words(tmp_path))
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


def test_files_that_do_not_fit_are_named(tmp_path, refusal_of):
    write(tmp_path)
    (tmp_path / "dict.tgt.txt").write_text("▁a 3\n▁b 2\n")
    assert "has 6 pieces with the special ones" in refusal_of(words(tmp_path))
    (tmp_path / "dict.tgt.txt").write_text("▁a 3\nb\n")
    assert "line 2 is not a piece with its count" in refusal_of(words(tmp_path))
    assert "give one file for both sides" in refusal_of(words(tmp_path, "--dict", "third"))
