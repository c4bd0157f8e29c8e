"""Translates UTF-8 text from standard input to standard output, one sentence per line: one line out for every line in.
Defaults come from the model's config.yaml. With --nbest above 1 each output line is `NUMBER ||| TRANSLATION ||| SCORE`,
where NUMBER is that of the input line, counted from 0.
"""

import argparse
import contextlib
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import Parser, add_device, add_model, add_precision, add_repeated, add_workers
from fasttfm.cli.paths import INPUT_FILE, MODEL, OUTPUT_FILE
from fasttfm.config import add_flags, flag_values
from fasttfm.config.fields import flag_name
from fasttfm.system.files import writing

if TYPE_CHECKING:
    from fasttfm.translate.translator import Translation, Translator


def add_arguments(parser: Parser) -> None:
    add_model(parser, "fasttfm train, or a .zip of its files")
    add_device(parser)
    add_precision(parser, "translation_precision")
    add_workers(
        parser,
        "processes that translate on a CPU and share the weights; auto: OMP_NUM_THREADS, or one per core, if the "
        "input is long enough",
    )
    _add_companions(parser)
    parser.add_argument(
        "--score",
        type=INPUT_FILE,
        help="instead of translating, print the natural log-probability of these translations, end of sentence "
        "included, one line for each input line",
    )
    add_flags(parser, ["decoding"])
    add_output_flags(parser, lines="its translations with their scores")
    flags = [action.option_strings[0] for action in parser._actions if action.option_strings]
    parser.apart = [("--split-sentences", "--prefix"), *(("--score", flag) for flag in flags if flag not in _SCORING)]
    parser.shorten(*_SHOWN, examples=_EXAMPLES)


_SCORING = ("--score", "--checkpoint", "--device", "--precision", "--buffer-size", "--quiet", "--json", "--help")
"""Flags that may be combined with --score."""
_SHOWN = (
    *("--checkpoint", "--device", "--precision", "--workers", "--ensemble", "--split-sentences", "--quiet", "--json"),
    *("--prefix", "--banned", "--terminology", "--shortlist", "--alignment", "--score"),
    *("--beam", "--nbest", "--length-penalty", "--alpha", "--max-len-a", "--max-len-b", "--sampling", "--batch-tokens"),
)
"""Flags that --help shows."""
_EXAMPLES = """
    fasttfm translate MODEL < in.en > out.de
    fasttfm translate MODEL --beam 8 --nbest 3 --json < in.en
    fasttfm translate MODEL --score ref.de < in.en       # log-probabilities, for reranking and filtering
"""

_FILES = {
    "--prefix": "file with a line for every input line: the start of its translation, or empty",
    "--banned": "file of words or phrases, one per line, that no translation may contain; words that begin with the "
    "same tokens are banned too",
    "--terminology": "file of terms, one per line: the source term and its translations, separated by tabs; lines with "
    "the term use one of these translations",
    "--shortlist": "vocabulary map from fasttfm shortlist, or CTranslate2's vmap.txt: restricts the output to the "
    "target tokens listed for the line's source tokens",
    "--alignment": "file to write word alignments to, in Pharaoh format: `0-0 1-2` links source words to words of the "
    "translation, counted from 0",
}
"""Flag of a file that accompanies the input -> its help."""


def _add_companions(parser: argparse.ArgumentParser) -> None:
    """Add the flags for files that accompany the input, for ensembles and for sentence splitting."""
    for flag, text in _FILES.items():
        parser.add_argument(flag, type=OUTPUT_FILE if flag == "--alignment" else INPUT_FILE, metavar="FILE", help=text)
    ensemble = "model directory with the same tokenizer, whose probabilities are averaged with MODEL's"
    add_repeated(parser, "--ensemble", ensemble, type=MODEL)
    parser.add_argument(
        "--split-sentences",
        metavar="LANGUAGE",
        help="split lines into sentences of this language (en, de, ...), translate each, and rejoin them; needs "
        "sentencex",
    )


def run(args: argparse.Namespace) -> None:
    """Translate standard input one buffer of lines at a time."""
    from fasttfm.data.corpus import is_cut, read_lines
    from fasttfm.translate.combinations import refuse_config
    from fasttfm.translate.translator import Translator

    settings = flag_values(args, ["decoding"])
    if sys.stdin.isatty():
        settings["buffer_size"] = 1  # interactive: translate each line as it is typed
    for path in (args.prefix, args.banned, args.terminology):
        if path is not None and is_cut(path):
            _warn(f"{path}: its last line has no end: copy the file again if it was truncated")
    if args.score is not None:
        _score_lines(args, settings)
        return
    translator = Translator.from_directory(
        args.model,
        args.checkpoint,
        device=args.device,
        precision=args.translation_precision,
        workers=args.workers,
        banned=[] if args.banned is None else list(read_lines(args.banned)),
        ensemble=args.ensemble,
        terminology=args.terminology,
        shortlist=args.shortlist,
        aligned=args.alignment is not None,
        **settings,
    )
    config = translator.config
    beside = ("terminology", "split_sentences")
    refuse_config([name for name in beside if getattr(args, name) is not None], config, flag_name)
    if config.diverse_beam_groups > 1 and config.nbest > config.beam // config.diverse_beam_groups:
        _warn(
            "groups may find the same translation, which is written once: a line has "
            f"{config.beam // config.diverse_beam_groups} to {config.nbest} translations"
        )
    _translate_lines(args, translator)
    split = "split the input into sentences (--split-sentences)"
    too_long = f"longer than twice the longest line of training ({translator.trained_length} tokens)"
    for lines, problem, remedy in (
        (translator.cut, f"truncated after {config.max_source_length:,} tokens",
         f"{split}, or raise --max-source-length (at most the model's positions, where they are learned)"),
        (translator.long, too_long, f"{split}, or parts get lost"),
        (translator.decomposed, "not in Unicode's normal form C",
         "convert the input (uconv -x nfc), or prepare the data with --normalization nfc"),
        (translator.empty, "empty translation", "give --min-len 1" if not config.min_len else "look at the input"),
    ):  # fmt: skip
        if lines.count:
            _warn(f"{problem}: {lines}: {remedy}")


def _warn(text: str) -> None:
    print(f"fasttfm translate: warning: {text}", file=sys.stderr)


def _score_lines(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Print the log-probability of each given translation, one buffer of lines at a time."""
    from fasttfm.data.corpus import decode_lines, read_lines
    from fasttfm.errors import UserError
    from fasttfm.translate.translator import Translator

    translator = Translator.from_directory(
        args.model, args.checkpoint, device=args.device, precision=args.translation_precision, workers=1, **settings
    )
    lines = decode_lines(sys.stdin.buffer, "standard input")
    pairs, number = itertools.zip_longest(lines, read_lines(args.score)), 0
    output = Output.of(args, "translate")
    with output.bar(unit=" pairs") as bar:
        while buffer := list(itertools.islice(pairs, translator.config.buffer_size)):
            if None in buffer[-1]:
                shorter = "standard input" if buffer[-1][0] is None else args.score
                raise UserError(
                    f"{shorter} has fewer lines than the other side of --score: both must align line by line"
                )
            for score in translator.score(*map(list, zip(*buffer))):
                print(json.dumps({"line": number, "score": round(score, 6)}) if args.json else f"{score:.6f}")
                number += 1
            sys.stdout.flush()
            bar.update(len(buffer))


def _translate_lines(args: argparse.Namespace, translator: "Translator") -> None:
    """Translate standard input line by line, with prefixes and alignments if given."""
    from tqdm import tqdm

    from fasttfm.data.corpus import decode_lines, read_lines
    from fasttfm.translate.alignment import pharaoh
    from fasttfm.translate.sentences import sentence_splitter, translate_sentences

    with contextlib.ExitStack() as stack:
        alignment = None if args.alignment is None else stack.enter_context(writing(args.alignment))
        prefixes = None if args.prefix is None else read_lines(args.prefix)
        lines = decode_lines(sys.stdin.buffer, "standard input")
        if args.split_sentences is not None:
            stream = translate_sentences(translator, lines, sentence_splitter(args.split_sentences))
        else:
            stream = translator.translate_stream(lines, prefixes)
        # a bar if standard error is the only stream on a terminal
        visible = not args.quiet and sys.stderr.isatty() and not sys.stdout.isatty() and not sys.stdin.isatty()
        with_progress = tqdm(stream, unit=" lines", file=sys.stderr, disable=not visible)
        for number, translations in enumerate(with_progress):
            _write(number, translations, numbered=translator.config.nbest > 1, as_json=args.json)
            if alignment is not None:
                alignment.writelines(f"{pharaoh(each.alignment)}\n".encode() for each in translations)


def _write(number: int, translations: "list[Translation]", numbered: bool, as_json: bool) -> None:
    """Write the output of one input line and flush; always UTF-8, whatever the locale."""
    if as_json:
        outputs = [{"text": each.text, "score": round(each.score, 6)} for each in translations]
        text = json.dumps({"line": number, "translations": outputs}, ensure_ascii=False) + "\n"
    elif numbered:
        text = "".join(f"{number} ||| {each.text} ||| {each.score:.6f}\n" for each in translations)
    else:
        text = f"{translations[0].text}\n"
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()
