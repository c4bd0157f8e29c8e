"""A student beside its teacher: BLEU and sentences a second of one text.

    python -m benchmarks.students --teacher TEACHER --student STUDENT --src test.en --ref test.de [--rounds 3]

Both are model directories, made as docs/distillation.md says. Each translates the text with its own search settings
and as many processes as `fasttfm translate` takes, in turns; a first turn, which starts the processes, is not timed.
Appends one line to benchmarks/results/students.jsonl.
"""

import contextlib
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import command
from fasttfm.data.corpus import read_lines
from fasttfm.data.scoring import bleu
from fasttfm.decoding import Translator
from fasttfm.errors import UserError


def measure(models: dict[str, Path], source: list[str], references: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each model."""
    with contextlib.ExitStack() as stack:
        translators = {n: stack.enter_context(Translator.from_directory(path)) for n, path in models.items()}
        ways = {name: partial(translator.translate, source) for name, translator in translators.items()}
        seconds, translations = command.in_turns(ways, rounds)
    return [
        {
            "model": name,
            "bleu": round(bleu(translations[name], references).value, 2),
            "sentences_per_second": round(len(source) / statistics.median(seconds[name]), 1),
            "seconds": [round(each, 3) for each in seconds[name]],
            "parameters": sum(parameter.numel() for parameter in translator.model.parameters()),
            "beam": translator.config.beam,
        }
        for name, translator in translators.items()
    ]


@command.program(
    command.flag("--teacher", type=Path, required=True, metavar="MODEL", help="the teacher's directory"),
    command.flag("--student", type=Path, required=True, metavar="MODEL", help="the student's directory"),
    command.flag("--src", type=Path, required=True, metavar="FILE", help="text to translate, plain or packed"),
    command.flag("--ref", type=Path, required=True, metavar="FILE", help="its translation by people"),
    command.rounds(3, "both"),
)
def main(args: Any) -> dict[str, Any]:
    source, references = list(read_lines(args.src)), list(read_lines(args.ref))
    if len(source) != len(references) or not source:
        raise UserError(f"--src has {len(source):,} lines and --ref {len(references):,}: both must align line by line")
    measured = measure({"teacher": args.teacher, "student": args.student}, source, references, max(1, args.rounds))
    for row in measured:
        print(f"{row['model']}: BLEU {row['bleu']}, {row['sentences_per_second']:,} sentences/s, beam {row['beam']}")
    return {"text": args.src.name, "sentences": len(source), "measured": measured}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
