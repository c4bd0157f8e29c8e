"""From raw text to BLEU with the user's commands, kept as one record.

    python -m benchmarks end_to_end demo                                       built in, minutes; part of --full
    python -m benchmarks end_to_end multi30k --text FOLDER --work FOLDER [-- --max-minutes 30 ...]
    python -m benchmarks end_to_end multi30k --text FOLDER --work FOLDER --peer torch.nn --minutes 30
    python -m benchmarks end_to_end tatoeba-enja --text FOLDER --work FOLDER
    python -m benchmarks end_to_end wmt-news --text FOLDER --work FOLDER        newstests of other years, 2014's as test
    python -m benchmarks end_to_end multi30k-fast --text FOLDER [-- --seed 1]     the speedrun, docs/speedrun.md
    python -m benchmarks end_to_end multi30k-fast --text FOLDER --work FOLDER --test test_2016_flickr [-- --seed 1]

FOLDER holds train, valid and test files named as in CORPORA, plain or gzip. Arguments after `--` go to `fasttfm train`.
The demo corpus is generated. Without --work, the demo and the speedrun use a temporary folder. An interrupted run can
be restarted: training resumes, and a finished run is only scored, on other files with --test. Its record lacks the
minutes of the steps.

--peer replaces `fasttfm train` and `translate` by the plain torch.nn trainer (peers/torch_nn_trainer.py) on the same
prepared data, with the preset's model and batches, for --minutes, with greedy search. It always trains from scratch.
"""

import gzip
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.measure import machine, records
from benchmarks.measure.providers import TORCH_NN
from fasttfm.cli.parser import InRange
from fasttfm.data.demo import write_demo_corpus
from fasttfm.errors import UserError
from fasttfm.store.run_log import read_log
from fasttfm.system.children import child_environment, command_line, run_to_end
from fasttfm.system.parsing import parse_json

BUILT_IN = "demo"
"""Corpus that needs no files."""
STEPS = ("prepare", "train", "translate", "score")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A corpus with English sources, and its options for each command."""

    target: str = "de"
    """Suffix of the target files."""
    test: str = "test"
    """Stem of the test files."""
    vocab_size: int = 8000
    prepare: tuple[str, ...] = ()
    train: tuple[str, ...]
    translate: tuple[str, ...] = ()
    score: tuple[str, ...] = ()
    goal: tuple[float, float] | None = None
    """Target BLEU, and the minutes from text to score to reach it in."""


CORPORA = {
    BUILT_IN: Corpus(vocab_size=2000, train=("--preset", "demo")),
    "multi30k": Corpus(test="test_2016_flickr", train=("--preset", "multi30k", "--seed", "1")),
    "multi30k-fast": Corpus(
        test="valid",
        vocab_size=4000,
        train=("--preset", "multi30k-fast", "--no-tensorboard", "--threads", "2"),  # of one process, docs/speedrun.md
        translate=("--checkpoint", "last"),
        goal=(39.0, 20.0),
    ),
    "multi30k-gpu": Corpus(
        test="test_2016_flickr",
        vocab_size=4000,
        train=("--preset", "multi30k-fast", "--no-tensorboard", "--max-minutes", "1.1", "--seed", "1"),
        translate=("--checkpoint", "last"),
        goal=(39.0, 1.5),
    ),
    "tatoeba-enja": Corpus(
        target="ja",
        prepare=("--separate-vocab",),
        train=("--preset", "tatoeba-enja", "--seed", "1"),
        score=("--tokenize", "char"),
    ),
    "wmt-news": Corpus(train=("--preset", "multi30k", "--seed", "1")),
}


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UserError(f"--text {folder} has neither {name} nor {name}.gz")


def fasttfm(command: list[str], **options: Any) -> subprocess.CompletedProcess:
    """Run a fasttfm command; raises SystemExit with its status if it fails."""
    print("$ fasttfm", *command, flush=True)
    done = run_to_end(command_line(*command), env=child_environment(), **options)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done


def prepare(name: str, text: Path, work: Path) -> Path:
    """Folder of the prepared data; runs `fasttfm prepare` if it does not exist."""
    corpus, data = CORPORA[name], work / "data"
    if not data.exists():
        sides = ("en", corpus.target)
        train, valid = ([str(_file(text, f"{part}.{side}")) for side in sides] for part in ("train", "valid"))
        files = ["--src", train[0], "--tgt", train[1], "--valid-src", valid[0], "--valid-tgt", valid[1]]
        vocabulary = ["--vocab-size", str(corpus.vocab_size), *corpus.prepare]
        work.mkdir(parents=True, exist_ok=True)
        fasttfm(["prepare", *files, *vocabulary, "--out", str(data)])
    return data


def test_set(name: str, text: Path, test: str) -> tuple[bytes, Path]:
    """Source side of a test set, and the file of its references."""
    source = _file(text, f"{test}.en")
    with (gzip.open if source.suffix == ".gz" else open)(source, "rb") as lines:
        return lines.read(), _file(text, f"{test}.{CORPORA[name].target}")


def scored(name: str, output: Path, reference: Path) -> dict[str, Any]:
    """Scores of the test set's translations in `output`, by `fasttfm score`."""
    with output.open("rb") as hypotheses:
        score = ["score", "--ref", str(reference), *CORPORA[name].score, "--json"]
        return parse_json(fasttfm(score, stdin=hypotheses, stdout=subprocess.PIPE).stdout)


def training_fields(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Record fields computed from a training log, ours or the peer's."""
    steps = [entry for entry in log if entry["kind"] == "train"]
    if not steps:
        raise UserError("training ended before its first log entry: train longer, or lower --log-interval")
    tokens = sum(entry["target_tokens"] for entry in steps)
    updating = sum(entry["target_tokens"] / entry["tokens_per_second"] for entry in steps)
    curve = [
        {key: entry[key] for key in ("step", "seconds", "loss", "bleu", "lines") if entry.get(key) is not None}
        for entry in log
        if entry["kind"] == "valid"
    ]
    return {
        "training_minutes": round(max(entry.get("seconds", 0.0) for entry in log) / 60, 1),
        "updates": steps[-1]["step"],
        "target_tokens": tokens,
        "target_tokens_per_second": round(tokens / updating),
        "padding": round(sum(entry["padding"] for entry in steps) / len(steps), 4),
        **{key: steps[-1][key] for key in ("batch_shapes", "peak_memory") if key in steps[-1]},
        "training_curve": [[entry["step"], round(entry["loss"], 3)] for entry in steps if entry["step"] % 250 == 0],
        "validation_curve": curve,
    }


def run(name: str, text: Path, work: Path, more: Sequence[str], test: str | None = None) -> dict[str, Any]:
    """Prepares, trains, translates a test set, by default the corpus's, and scores it. Returns the record without the
    machine."""
    corpus, model, output = CORPORA[name], work / "model", work / "output.txt"
    # before minutes of training, which a missing file would waste
    lines, reference = test_set(name, text, test or corpus.test)
    resumes = model.exists()
    marks = [time.perf_counter()]
    data = prepare(name, text, work)
    marks.append(time.perf_counter())
    train_command = ["train", *corpus.train, *more]
    fasttfm([*train_command, "--data", str(data), "--out", str(model)])
    marks.append(time.perf_counter())
    with output.open("wb") as out:
        fasttfm(["translate", str(model), *corpus.translate], input=lines, stdout=out)
    marks.append(time.perf_counter())
    scores = scored(name, output, reference)
    marks.append(time.perf_counter())
    seconds = dict(zip(STEPS, (end - begin for begin, end in itertools.pairwise(marks))))
    return {
        "corpus": name,
        **({"test": test} if test else {}),
        "train_command": " ".join(["fasttfm", *machine.without_folders(train_command)]),
        "translate_seconds": round(seconds["translate"], 1),
        **({} if resumes else {"minutes_of": {step: round(each / 60, 2) for step, each in seconds.items()}}),
        **scores,
        **training_fields(read_log(model)),
    }


def run_peer(name: str, text: Path, work: Path, minutes: float, more: Sequence[str] = ()) -> dict[str, Any]:
    """run() with the plain torch.nn trainer; the record's corpus is "NAME, torch.nn". more: trainer arguments."""
    out, output = work / "torch.nn", work / "output-torch.nn.txt"
    lines, reference = test_set(name, text, CORPORA[name].test)
    data = prepare(name, text, work)
    preset = CORPORA[name].train[CORPORA[name].train.index("--preset") + 1]
    options = ["--preset", preset, "--minutes", f"{minutes:g}", "--seed", "1", *more]
    command = ["-m", "benchmarks.peers.torch_nn_trainer", *options]
    print("$ python", *command, flush=True)
    with output.open("wb") as translations:
        program = [sys.executable, *command, "--data", str(data), "--out", str(out)]
        done = run_to_end(program, input=lines, stdout=translations, cwd=machine.ROOT, env=child_environment())
    if done.returncode:
        raise SystemExit(done.returncode)
    log = [parse_json(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {
        "corpus": f"{name}, torch.nn",
        "train_command": " ".join(["python", *command]),
        "translate_seconds": log[-1]["translate_seconds"],
        **scored(name, output, reference),
        **training_fields(log),
    }


def keep(record: dict[str, Any], folder: Path) -> None:
    """Appends the record and the machine to the file of its corpus and trainer, and prints the result."""
    file = folder / f"end-to-end-{record['corpus'].replace(', ', '-').replace('.', '-')}.jsonl"
    records.append(file, {"benchmark": "end_to_end", **record, "machine": machine.describe()})
    result = f"BLEU {record['bleu']:.2f} after {record['training_minutes']} minutes of training"
    print(f"{result}; kept in {file}", flush=True)
    goal = CORPORA[record["corpus"]].goal if record["corpus"] in CORPORA else None
    if goal is not None and "minutes_of" in record and "test" not in record:
        minutes = sum(record["minutes_of"].values())
        reached = "reached" if record["bleu"] >= goal[0] and minutes <= goal[1] else "not reached"
        print(f"{minutes:.2f} minutes from text to score: {goal[0]} in {goal[1]:g} minutes is {reached}")


def run_built_in(results: Path, device: str | None = None, threads: int | None = None) -> None:
    """Runs the built-in corpus with fasttfm, then equally long with the plain torch.nn trainer; keeps two records."""
    more = [*(["--device", device] if device else []), *(["--threads", str(threads)] if threads else [])]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        text = write_demo_corpus(work / "text")[0].parent
        ours = run(BUILT_IN, text, work, more)
        keep(ours, results)
        minutes = max(ours["training_minutes"], 0.1)
        keep(run_peer(BUILT_IN, text, work, minutes, more), results)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    more = arguments[end + 1 :]
    parser = command.parser("benchmarks end_to_end", __doc__)
    add = parser.add_argument
    add("corpus", choices=CORPORA)
    add("--text", type=Path, help="folder of train, valid and test files; generated for demo")
    add("--work", type=Path, help="folder for prepared data, model and output")
    add("--peer", choices=[TORCH_NN], help="trainer to use instead of fasttfm")
    add("--minutes", type=InRange(0.01, 10**6, float), help="training time with --peer")
    add("--threads", type=InRange(0, 1024), default=0, help="CPU threads with --peer; 0: PyTorch's default")
    add("--test", metavar="STEM", help="files of --text to translate and score (default: the corpus's test set)")
    add("--note", help="text to keep in the record")
    args = parser.parse_args(arguments[:end])
    if bool(args.peer) != (args.minutes is not None) or (args.peer and more):
        parser.error("--peer and --minutes go together, without arguments after --")
    if args.peer and args.test:
        parser.error("--test does not go with --peer")
    needs_work = args.corpus != BUILT_IN and CORPORA[args.corpus].goal is None
    if (args.corpus != BUILT_IN and args.text is None) or (needs_work and args.work is None):
        parser.error(f"{args.corpus} needs --text and --work: only {BUILT_IN} has built-in text")
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        text = args.text or write_demo_corpus(work / "text")[0].parent
        if args.peer:
            threads = ["--threads", str(args.threads)] if args.threads else []
            record = run_peer(args.corpus, text, work, args.minutes, threads)
        else:
            record = run(args.corpus, text, work, more, args.test)
    if args.note:
        record["note"] = args.note
    keep(record, args.results)
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
