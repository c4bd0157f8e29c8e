"""fairseq-train's flags in `fasttfm train`: what differs only by name is taken, what has no counterpart is told so."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fasttfm.errors import UserError

ALIASES = {
    "--encoder-embed-dim --decoder-embed-dim": "d_model",
    "--encoder-ffn-embed-dim --decoder-ffn-embed-dim": "d_ff",
    "--encoder-attention-heads --decoder-attention-heads": "heads",
    "--activation-fn": "activation",
    "--activation-dropout": "relu_dropout",
    "--lr-scheduler": "schedule",
    "--validate-interval-updates": "valid_interval_updates",
    "--keep-best-checkpoints": "keep_best",
    "--save-dir": "out",
    "--finetune-from-model": "init_from",
}
"""fairseq's flags -> the field or the argument here."""

ELSEWHERE = {
    "--arch": "give --preset (paper-base is transformer_wmt_en_de, iwslt14 is transformer_iwslt_de_en)",
    "--task": "there is one task, translation: leave it out",
    "--criterion": "there is one, label-smoothed cross entropy: leave it out and give --label-smoothing",
    "--fp16": "give --precision fp16, or bf16 where the chip has it",
    "--bf16": "give --precision bf16",
    "--encoder-normalize-before --decoder-normalize-before": "give --norm-first --final-norm",
    "--share-all-embeddings": "give --share-embeddings all, which is the default",
    "--share-decoder-input-output-embed": "give --share-embeddings decoder",
    "--encoder-learned-pos --decoder-learned-pos": "positions are sinusoids: leave it out",
    "--layernorm-embedding": "there is no norm on embeddings: leave it out",
    "--source-lang --target-lang": "the prepared data say which side is which: leave it out",
    "--batch-size --max-sentences": "batches are measured in tokens: give --max-tokens",
    "--max-source-positions --max-target-positions": "give --max-sentence-tokens",
    "--min-lr --stop-min-lr": "give --max-update",
    "--warmup-init-lr": "warm-up begins at 0: leave it out",
    "--ddp-backend": "give --shard for fully_sharded, and nothing for the others",
    "--distributed-world-size": "give --workers, or start with torchrun (docs/training.md)",
    "--num-workers": "batches need no processes of their own: leave it out",
    "--save-interval": "give --save-interval-updates",
    "--validate-interval": "give --valid-interval-updates",
    "--keep-last-epochs": "give --keep-interval-updates",
    "--no-epoch-checkpoints": "checkpoints are saved by updates: leave it out",
    "--eval-bleu": "give --valid-bleu, which is the default",
    "--best-checkpoint-metric": "validation BLEU decides, or the loss with --no-valid-bleu: leave it out",
    "--maximize-best-checkpoint-metric": "validation BLEU decides, or the loss with --no-valid-bleu: leave it out",
    "--restore-file": "the same command goes on by itself; give --init-from for a new run",
    "--reset-optimizer": "give --init-from with a new --out, which begins with the weights alone",
    "--fp16-init-scale": "the loss scale begins at 65,536: leave it out",
    "--encoder-layerdrop --decoder-layerdrop": "layers are not dropped: leave it out",
}
"""fairseq's flags -> what to do in their place."""

_VALUES = {"schedule": {"inverse_sqrt": "inverse-sqrt", "fixed": "constant"}, "activation": {"swish": "silu"}}
"""Field -> fairseq's word for a value -> the word here."""


def add_fairseq_flags(parser: argparse.ArgumentParser) -> None:
    """Let a parser, which has our own flags, know fairseq's; its help does not show them."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flags, name in ALIASES.items():
        parser.add_argument(*flags.split(), dest=name, action=_Alias, **hidden)
    for flags, told in ELSEWHERE.items():
        parser.add_argument(*flags.split(), nargs="?", const=told, action=_Elsewhere, **hidden)


class _Alias(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, flag: Any = None) -> None:
        given = _VALUES.get(self.dest, {}).get(value, value)
        before = getattr(namespace, self.dest, None)
        if before is not None and str(before) != given:
            ours = f"--{self.dest.replace('_', '-')}"
            raise UserError(f"{flag} {value}: is {ours} here, which is {before} already: both sides have one")
        setattr(namespace, self.dest, Path(given) if self.dest in ("out", "init_from") else given)


class _Elsewhere(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, flag: Any = None) -> None:
        raise UserError(f"{flag} is fairseq's: {self.const}")
