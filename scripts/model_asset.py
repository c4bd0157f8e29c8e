"""Packs a trained model for a release as one file, which `fasttfm translate FILE` and `fasttfm serve FILE` read.

Usage: scripts/model_asset.py MODEL FILE.zip. Its matrices become 8-bit integers; README.md in it is its card.
"""

import sys
import tempfile
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from fasttfm.config import build
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.models.pretrained import model_card
from fasttfm.store.conversion import quantize_model
from fasttfm.store.model_dir import read_config


def pack(model: Path, out: Path) -> int:
    """Write the best checkpoint of a model directory and its card into a file; return the file's bytes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "model")
        quantize_model(model, "best", folder, Transformer)
        origin = ["trained by fasttfm; its matrices are 8-bit integers, and fasttfm multiplies in int8 on a CPU"]
        card = model_card(build(read_config(model)).model, model, origin).replace("DIRECTORY", out.name)
        (folder / "README.md").write_text(card, encoding="utf-8")
        with ZipFile(out, "w") as archive:
            for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
                name = ZipInfo(
                    path.relative_to(folder).as_posix()
                )  # of one date, so that the same model is the same file
                archive.writestr(name, path.read_bytes(), ZIP_DEFLATED)
    return out.stat().st_size


if __name__ == "__main__":
    try:
        print(f"{sys.argv[2]}: {pack(Path(sys.argv[1]), Path(sys.argv[2])):,} bytes")
    except UserError as error:
        raise SystemExit(f"scripts/model_asset.py: {error}") from None
