"""Sequence-level distillation: a teacher's translations of the training text as a student's training data.

A student learns a teacher's search results more easily than what people wrote: they vary less. What it is validated on
stays what people wrote. Source: Kim and Rush 2016 ("Sequence-Level Knowledge Distillation"), section 3.2.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fasttfm.checkpoints.steps import resolve_checkpoint
from fasttfm.data.prepare import PrepareOptions, Progress, prepare
from fasttfm.data.prepared import PreparedData
from fasttfm.decoding import Translator
from fasttfm.errors import UserError
from fasttfm.files import replace_file
from fasttfm.locks import locked
from fasttfm.wording import counted

_CHUNK = 2000
"""Sentences that are translated, and kept, at a time."""


def distill_translation(
    teacher: Path,
    data_dir: Path,
    out: Path,
    *,
    checkpoint: str = "best",
    device: torch.device | None = None,
    say: Callable[[str], None] = print,
    progress: Callable[[str], Progress] | None = None,
    **decoding: Any,
) -> None:
    """Write a prepared directory `out` of the sources in data_dir with the teacher's translations as targets.

    The vocabularies and the validation pairs are those of data_dir. decoding: fields of DecodingConfig that differ from
    the teacher's own. What is translated is kept in `out`.partial, from which the same command goes on after a stop.
    Raises UserError for a teacher or data that cannot be used.
    """
    data = PreparedData.open(data_dir)
    if out.resolve() == data_dir.resolve():
        raise UserError(f"--out {out}: is the data that is read: choose another --out")
    translator = Translator.from_directory(teacher, checkpoint, device=device, **decoding)
    part = out.with_name(f"{out.name}.partial")
    with translator, locked(part, "translating into it"):
        _begin(part, teacher, checkpoint, data, translator)
        _translate(translator, data, part, say, None if progress is None else progress("sources"))
        prepare(
            [part / "train.src"],
            [part / "train.tgt"],
            [data_dir / "valid.src.txt"],
            [data_dir / "valid.tgt.txt"],
            out,
            PrepareOptions(max_length=data.description["fingerprint"]["options"]["max_length"]),
            models=[data_dir],
            say=say,
            progress=progress or (lambda noun: lambda done, total: None),
        )
    shutil.rmtree(part)


def _begin(part: Path, teacher: Path, checkpoint: str, data: PreparedData, translator: Translator) -> None:
    """Make the folder of what is translated so far, or check that it is of this teacher, data and search."""
    saved = resolve_checkpoint(teacher, checkpoint)
    weights = hashlib.sha256()
    for file in sorted(path for path in (saved, *saved.rglob("*")) if path.is_file()):
        weights.update(file.read_bytes())
    config = translator.config
    of = {
        "teacher": weights.hexdigest(),
        "search": {name: getattr(config, name) for name in config.__dataclass_fields__},
        "data": data.description["fingerprint"],
    }
    description = json.dumps(of, sort_keys=True, indent=1, default=str).encode()
    path = part / "of.json"
    if path.exists() and path.read_bytes() != description:
        raise UserError(
            f"{part}: holds translations by another teacher, search or data: delete it, or give another --out"
        )
    replace_file(path, description)


def _translate(
    translator: Translator, data: PreparedData, work: Path, say: Callable[[str], None], progress: Progress | None
) -> None:
    """Bring train.src and train.tgt of the work folder to the whole training text."""
    source, target = work / "train.src", work / "train.tgt"
    total = len(data.train)
    done = min(map(_cut, (source, target)))
    for path in (source, target):  # of a chunk that a kill has cut, one may have more lines
        _cut(path, done)
    if done:
        say(f"going on after {counted(done, 'sentence')} of {total:,}")
    lines = (data.source_tokenizer.decode(data.train.source(number)) for number in range(done, total))
    with source.open("ab") as sources, target.open("ab") as targets:
        while chunk := list(islice(lines, _CHUNK)):
            translations = translator.translate(chunk)
            # sources first: the targets tell how far the work is
            for file, texts in ((sources, chunk), (targets, translations)):
                file.write("".join(f"{text}\n" for text in texts).encode())
                file.flush()
            done += len(chunk)
            if progress is None:
                say(f"translated {done:,} of {total:,} sentences")
            else:
                progress(done, total)


def _cut(path: Path, most: int | None = None) -> int:
    """Cut a file off after its whole lines, or after `most` of them; how many there are then."""
    if not path.exists():
        return 0
    lines = path.read_bytes().split(b"\n")[:-1][:most]
    os.truncate(path, sum(len(line) + 1 for line in lines))
    return len(lines)
