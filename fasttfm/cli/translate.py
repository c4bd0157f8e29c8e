"""Translates UTF-8 text from standard input to standard output, one sentence a line: one line out for every line in.
Settings that are not given come from the model's config.yaml. With --nbest above 1 each line is `NUMBER ||| TRANSLATION
||| SCORE`, where NUMBER is the input line's, counted from 0.
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fasttfm.cli.output import Output, add_output_flags
from fasttfm.cli.parser import Parser, add_device, add_model, add_precision, add_workers
from fasttfm.cli.paths import INPUT_FILE, MODEL, OUTPUT_FILE
from fasttfm.config import add_flags, flag_values
from fasttfm.config.fields import flag_name
from fasttfm.system.files import writing

if TYPE_CHECKING:
    from fasttfm.system.wording import Tally
    from fasttfm.translate.translator import Translation, Translator


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    add_device(parser)
    add_precision(parser, "translation_precision")
    add_workers(
        parser,
        "processes that translate on a CPU, with one copy of the weights; auto: OMP_NUM_THREADS, or one for "
        "each core, if the input is long enough",
    )
    _add_companions(parser)
    parser.add_argument(
        "--score",
        type=INPUT_FILE,
        help="print the natural logarithm of the probability of these translations, a line for each line of the input "
        "and end of sentence included, in place of translating",
    )
    add_flags(parser, ["decoding"])
    add_output_flags(parser, lines="its translations with their scores")
    named = [each.option_strings[0] for each in parser._actions if each.option_strings]
    parser.apart = [("--split-sentences", "--prefix")]
    parser.apart += [("--score", flag) for flag in named if flag not in _OF_SCORES]
    parser.shorten(*_SHOWN, examples=_EXAMPLES)


_OF_SCORES = ("--score", "--checkpoint", "--device", "--precision", "--buffer-size", "--quiet", "--json", "--help")
"""Flags that mean something beside --score."""
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
    "--banned": "file of words or phrases, one a line, that no translation may contain; words that begin with the "
    "same tokens are banned too",
    "--terminology": "file of terms, one a line: the source term and its translations, separated by tabs; a line with "
    "the term gets one of these translations",
    "--shortlist": "vocabulary map of fasttfm shortlist or CTranslate2's vmap.txt: compute only the target tokens that "
    "it lists for a line's source tokens",
    "--alignment": "file to write each line's word alignment to, in Pharaoh format: `0-0 1-2` links source words with "
    "words of the translation, counted from 0",
}
"""Flag of a file that goes with the lines -> its help."""


def _add_companions(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what goes with the lines: files, other models, and how lines are read."""
    for flag, text in _FILES.items():
        parser.add_argument(flag, type=OUTPUT_FILE if flag == "--alignment" else INPUT_FILE, metavar="FILE", help=text)
    parser.add_argument(
        "--ensemble",
        type=MODEL,
        action="append",
        default=[],
        help="another model directory with the same tokenizer; its probabilities are averaged with MODEL's; may "
        "be repeated",
    )
    parser.add_argument(
        "--split-sentences",
        metavar="LANGUAGE",
        help="split lines into sentences of this language (en, de, ...), translate each, and join them again; "
        "needs sentencex",
    )


def run(args: argparse.Namespace) -> None:
    """Translate standard input, buffer by buffer."""
    from fasttfm.data.corpus import read_lines
    from fasttfm.translate.combinations import refuse_config
    from fasttfm.translate.translator import Translator

    settings = flag_values(args, ["decoding"])
    if sys.stdin.isatty():
        settings["buffer_size"] = 1  # somebody is typing and waits for each line
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
    _tell(
        translator.cut, f"cut off after {config.max_source_length:,} tokens",
        f"{split}, or raise --max-source-length (at most the model's positions, where they are learned)",
    )  # fmt: skip
    longest = translator.trained_length
    _tell(
        translator.long,
        f"longer than twice the longest line of training ({longest} tokens)",
        f"{split}, or parts get lost",
    )
    uncomposed = "convert the input (uconv -x nfc), or prepare the data with --normalization nfc"
    _tell(translator.decomposed, "not in Unicode's normal form C", uncomposed)
    _tell(translator.empty, "empty translation", "give --min-len 1" if not config.min_len else "look at the input")


def _tell(lines: "Tally", what: str, remedy: str) -> None:
    """Warn of lines that something is told of, if there are any."""
    if lines.count:
        _warn(f"{what}: {lines}: {remedy}")


def _warn(text: str) -> None:
    print(f"fasttfm translate: warning: {text}", file=sys.stderr)


def _score_lines(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Pair after pair, a buffer of lines at a time."""
    from fasttfm.data.corpus import decode_lines, read_lines
    from fasttfm.errors import UserError
    from fasttfm.translate.translator import Translator

    translator = Translator.from_directory(
        args.model, args.checkpoint, device=args.device, precision=args.translation_precision, workers=1, **settings
    )
    lines, given = decode_lines(sys.stdin.buffer, "standard input"), read_lines(args.score)
    pairs, number = itertools.zip_longest(lines, given), 0
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
    """Standard input line by line, with what goes with the lines."""
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
        for number, translations in enumerate(_shown(stream, args.quiet)):
            _write(number, translations, numbered=translator.config.nbest > 1, as_json=args.json)
            if alignment is not None:
                alignment.writelines(f"{pharaoh(each.alignment)}\n".encode() for each in translations)


def _shown(stream: "Iterator[list[Translation]]", quiet: bool) -> "Iterator[list[Translation]]":
    """The same, with the number of lines and their rate on standard error where somebody looks at that alone."""
    from tqdm import tqdm

    looks = not quiet and sys.stderr.isatty() and not sys.stdout.isatty() and not sys.stdin.isatty()
    return iter(tqdm(stream, unit=" lines", file=sys.stderr, disable=not looks))


def _write(number: int, translations: "list[Translation]", numbered: bool, as_json: bool) -> None:
    """The lines of one input line to standard output, at once, in UTF-8 whatever the locale says."""
    if as_json:
        outputs = [{"text": each.text, "score": round(each.score, 6)} for each in translations]
        text = json.dumps({"line": number, "translations": outputs}, ensure_ascii=False) + "\n"
    elif numbered:
        text = "".join(f"{number} ||| {each.text} ||| {each.score:.6f}\n" for each in translations)
    else:
        text = f"{translations[0].text}\n"
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()
