"""Trains and evaluates BERT, ALBERT and ELECTRA on plain text; fasttfm finetune fine-tunes them."""

import argparse
from pathlib import Path
from typing import Any

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import add_attention_layers, add_data, add_device, add_model
from fasttfm.cli.paths import INPUT_FOLDER, OUTPUT_PICTURE
from fasttfm.cli.verbs import Verb
from fasttfm_pretraining.cli import distill
from fasttfm_pretraining.cli.shared import PREPARE, add_huggingface_import, export_verb, train_verb

_MADE_BY = "fasttfm mlm train or mlm import"


def _task(kind: str) -> Any:
    from fasttfm_pretraining.training.masked_modelling import MaskedModelling

    return MaskedModelling(kind)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add_model(parser, _MADE_BY)
    add_device(parser)
    add_data(parser, "prepared documents; their held-out part is evaluated")
    add_output_flags(parser, "the score")


def _evaluate(args: argparse.Namespace) -> None:
    from fasttfm.system.machine import pick_device
    from fasttfm_pretraining.training.masked_modelling import evaluate

    score = evaluate(args.model, args.data, args.checkpoint, pick_device(args.device))
    Output.of(args, args.verb).result(str(score), **score.record())


def _add_attention(parser: argparse.ArgumentParser) -> None:
    add_model(parser, _MADE_BY)
    parser.add_argument("text", metavar="TEXT", help="text to read, in quotation marks")
    parser.add_argument(
        "--out",
        type=OUTPUT_PICTURE,
        default=Path("attention.png"),
        help="picture to write, .png or .svg (default: %(default)s)",
    )
    add_attention_layers(parser)
    add_output_flags(parser, "where the picture is")


def _attention(args: argparse.Namespace) -> None:
    from fasttfm.translate.attention_plot import draw_attention
    from fasttfm_pretraining.data.text_tokenizer import load_text_tokenizer
    from fasttfm_pretraining.decoding.text_attention import attention_of_text
    from fasttfm_pretraining.models.kinds import read_body

    body = read_body(args.model, args.checkpoint)
    draw_attention(attention_of_text(body, load_text_tokenizer(args.model), args.text), args.out, args.layers)
    Output.of(args, args.verb).result(str(args.out), picture=str(args.out))


def _add_import(parser: argparse.ArgumentParser) -> None:
    add_huggingface_import(parser, "Hugging Face folder of a BERT, ALBERT, ELECTRA, RoBERTa or DistilBERT")
    parser.add_argument("--generator", type=INPUT_FOLDER, help="Hugging Face folder of an ELECTRA's generator")


def _import(args: argparse.Namespace) -> None:
    import torch

    from fasttfm_pretraining.interop.bert_dirs import import_folder

    torch.manual_seed(0)  # of the generator that an ELECTRA comes without: every import gives the same
    model, told = import_folder(args.folder, args.out, args.generator, check=args.check)
    size = sum(parameter.numel() for parameter in model.parameters())
    tokens = model.config.vocab_size
    Output.of(args, args.verb).result(
        f"{args.out}: {size / 1e6:,.1f} million parameters, {tokens:,} tokens",
        model=str(args.out), parameters=size, tokens=tokens, told=told,
    )  # fmt: skip


def _write(*model: Any, check: bool) -> list[str]:
    from fasttfm_pretraining.interop.bert_dirs import export_folder

    return export_folder(*model, check=check)


VERBS = {
    "prepare": PREPARE,
    # ELECTRA's fields are those of all three
    "train": train_verb("mlm", "electra", _task, "train a BERT, ALBERT or ELECTRA on prepared documents, or resume"),
    "distill": distill.BERT,
    "evaluate": Verb(
        _add_evaluate, _evaluate, "print losses and accuracies on held-out text, with the same masks each time"
    ),
    "attention": Verb(_add_attention, _attention, "draw the attention weights of a text"),
    "import": Verb(_add_import, _import, "convert a Hugging Face model"),
    "export": export_verb("mlm", _MADE_BY, _write),
}
