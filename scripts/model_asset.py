"""Packs a trained model into one file for a release, for `fasttfm translate FILE` and `fasttfm serve FILE`.

Usage: scripts/model_asset.py MODEL FILE.zip [--record FILE] [--data TEXT]

Matrices are quantized to 8 bits; README.md in the file is the model card.
--record: file of `python -m benchmarks end_to_end`; its last record is the card's score.
--data: description of the training data for the card, such as their licence.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from fasttfm.config import build
from fasttfm.errors import UserError
from fasttfm.models.pretrained import model_card
from fasttfm.models.quantize import quantize_model
from fasttfm.store.model_dir import read_config
from fasttfm.system.parsing import parse_json


def pack(model: Path, out: Path, origin: Sequence[str] = ()) -> int:
    """Write the best checkpoint of a model directory and its card to a file; returns the size in bytes.

    origin: additional lines for the card.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        quantize_model(model, "best", folder)
        made = ["trained by fasttfm; its matrices are 8-bit integers, and fasttfm multiplies in int8 on a CPU", *origin]
        card = model_card(build(read_config(model)).model, model, made).replace("DIRECTORY", out.name)
        (folder / "README.md").write_text(card, encoding="utf-8")
        with ZipFile(out, "w") as archive:
            for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
                name = ZipInfo(path.relative_to(folder).as_posix())  # fixed date, for reproducible files
                archive.writestr(name, path.read_bytes(), ZIP_DEFLATED)
    return out.stat().st_size


def score(record: Path) -> str:
    """Card line for the last record in a file."""
    run = parse_json(record.read_text(encoding="utf-8").splitlines()[-1])
    machine = run["machine"]
    return (
        f"{run['bleu']:.1f} BLEU on {run['lines']:,} lines (`{run['bleu_signature']}`) before its matrices became "
        f"integers, after {run['training_minutes']:.0f} minutes on {machine['processor']}, {machine['cores']} cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path, metavar="FILE.zip")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--data")
    args = parser.parse_args()
    origin = [f"trained on {args.data}"] if args.data else []
    origin += [score(args.record)] if args.record else []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{args.out}: {pack(args.model, args.out, origin):,} bytes")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"scripts/model_asset.py: {error}") from None
