"""Import of checkpoints trained and saved by fairseq itself: results equal fairseq's.

Needs the unpacked sdist of fairseq 0.12.2 in $FASTTFM_FAIRSEQ; their_fairseq.py runs it.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from model_dirs import PAIRS, TEXT, tokenizer
from waiting import PATIENCE

from fasttfm.convert.exchange import load
from fasttfm.data.tokenizer import BOS, EOS
from fasttfm.models import Transformer
from fasttfm.search import translate_ids

from .test_fairseq import imported

pytest.importorskip("omegaconf", reason="fairseq needs omegaconf")
FAIRSEQ = os.environ.get("FASTTFM_FAIRSEQ", "")
pytestmark = pytest.mark.skipif(
    not FAIRSEQ, reason="FASTTFM_FAIRSEQ is not set: pip download fairseq==0.12.2, unpack it, and give its folder"
)
SIZES = [
    f"--{side}-{name}={value}"
    for side in ("encoder", "decoder")
    for name, value in {"embed-dim": 32, "ffn-embed-dim": 48, "attention-heads": 4, "layers": 2}.items()
]
BEFORE = ["--encoder-normalize-before", "--decoder-normalize-before"]
LEARNED = ["--encoder-learned-pos", "--decoder-learned-pos", "--max-source-positions=32", "--max-target-positions=24"]


def saved(folder: Path, *flags: str) -> None:
    """Run their_fairseq.py, which writes its files to folder."""
    spm = sentencepiece.SentencePieceProcessor(model_proto=tokenizer().model)
    (folder / "spm.model").write_bytes(tokenizer().model)
    for side, lines in (("src", [*PAIRS, *TEXT]), ("tgt", [*PAIRS.values(), *TEXT])):
        pieces = (" ".join(spm.encode(line, out_type=str)) for line in lines)
        (folder / f"text.{side}").write_text("".join(f"{line}\n" for line in pieces), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).with_name("their_fairseq.py")), FAIRSEQ, str(folder)]
    if not any(flag.startswith("--arch") for flag in flags):
        command += ["--arch=transformer"]
    done = subprocess.run([*command, *SIZES, *flags], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def compare(folder: Path) -> None:
    """Compare float32 log-probabilities and greedy translations."""
    given, theirs = load(folder / "MODEL"), torch.load(folder / "computed.pt", weights_only=True)
    model = Transformer(given.config)
    model.load_state_dict(given.weights, strict=False)
    model.eval()
    ours = [each.pieces(range(len(each))) for each in (given.source_tokenizer, given.target_tokenizer)]
    to_ours = [
        [side.index(piece, EOS + 1 if piece == "<s>" else 0) for piece in pieces]  # their <s> follows ours
        for side, pieces in zip(ours, theirs["pieces"])
    ]
    for each in theirs["computed"]:
        source = torch.tensor([[to_ours[0][number] for number in each["source"]]])
        target = [to_ours[1][number] for number in each["input"]]
        assert source[0, -1] == EOS
        with torch.no_grad():
            logits = model(source, torch.tensor([[BOS, *target[1:]]]))[0]
        mine = torch.log_softmax(logits, -1)[:, to_ours[1]]
        torch.testing.assert_close(mine, each["log_probabilities"], rtol=1e-5, atol=1e-5)
        (written,) = translate_ids(model, source.tolist(), dataclasses.replace(given.decoding, beam=1, max_len_b=20))
        assert written == [to_ours[1][number] for number in each["translation"]][:-1]


@pytest.mark.parametrize(
    "flags",
    [
        ["--share-all-embeddings"],
        ["--share-decoder-input-output-embed", *BEFORE],
        ["--share-all-embeddings", *LEARNED],
        [*LEARNED, *BEFORE],
        ["--share-all-embeddings", "--activation-fn=gelu", "--encoder-layers=1", "--decoder-layers=3"],
        ["--arch=transformer_wmt_en_de", "--fp16-init-scale=4", "--encoder-layerdrop=0.1"],
    ],
    ids=" ".join,
)
def test_a_checkpoint_of_fairseq_computes_the_same_here(tmp_path, capsys, flags):
    saved(tmp_path, *flags)
    assert imported(tmp_path) == 0
    assert "second copy of the encoder's matrices" in capsys.readouterr().out
    compare(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ["--share-all-embeddings", "--layernorm-embedding"],
        ["--share-all-embeddings", "--no-scale-embedding"],
        ["--no-token-positional-embeddings"],
        ["--no-cross-attention"],
        ["--share-all-embeddings", "--cross-self-attention"],
        ["--adaptive-softmax-cutoff=10,20", "--criterion=adaptive_loss", "--ddp-backend=legacy_ddp"],
        ["--activation-fn=tanh"],
        ["--decoder-output-dim=16"],
        ["--decoder-ffn-embed-dim=40"],
        ["--arch=lightconv", "--encoder-kernel-size-list=[3,7]", "--decoder-kernel-size-list=[3,7]"],
        ["--arch=transformer_align", "--full-context-alignment"],
    ],
    ids=" ".join,
)
def test_other_architectures_are_refused_or_compute_the_same(tmp_path, capsys, flags):
    saved(tmp_path, *flags)
    capsys.readouterr()
    status = imported(tmp_path)
    if status == 0:
        compare(tmp_path)
        return
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "checkpoint.pt") in line
    assert not (tmp_path / "MODEL").exists()
