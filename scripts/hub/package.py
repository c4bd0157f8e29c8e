"""Writes a kernel repository for Hugging Face's `kernels` and its kernel-builder.

    build.toml, flake.nix, CARD.md      for kernel-builder
    torch-ext/fasttfm/                  sources with relative imports; kernel-builder adds _ops.py
    build/torch-cpu, -cuda, -rocm/      the same, built: _ops.py has this build's namespace in torch.ops,
                                        metadata.json its id and a digest of every file
Source: https://huggingface.co/docs/kernels/kernel-requirements (0.17).
"""

import base64
import hashlib
import json
from pathlib import Path

from fasttfm import __version__
from fasttfm.system.folders import replacing
from scripts.hub import texts
from scripts.hub.sources import place, relative, sources

NAME = "fasttfm"
BACKENDS = ("cpu", "cuda", "rocm")
VERSION = 0
"""Major version of the package; 0: its layers may still change."""

_LAYERS = Path(__file__).with_name("layers.py")
_SOURCE = Path("torch-ext") / NAME


def write_package(out: Path, *, repo_id: str = "fasttfm/fasttfm", version: int = VERSION) -> dict[str, str]:
    """Write the repository to the folder `out` atomically, replacing an older one; returns backend -> unique id.

    repo_id: name on the hub. version: interface version, from 0. Raises UserError for a folder with other files.
    """
    files = _sources()
    digest = hashlib.sha256(repr((version, sorted(files.items()))).encode()).hexdigest()[:8]
    ids = {backend: f"_{NAME}_{backend}_{digest}" for backend in BACKENDS}
    with replacing(out, "writing the package into it", "package of kernels") as fresh:
        root = fresh.path
        _write(root, {"build.toml": texts.build(repo_id, version, BACKENDS), "flake.nix": texts.FLAKE})
        _write(root, {"CARD.md": texts.card(repo_id, version, __version__)})
        _write(root / _SOURCE, files)
        for backend, unique in ids.items():
            built = {**files, "_ops.py": texts.namespace(unique), f"{NAME}/__init__.py": texts.OLDER}
            built["metadata.json"] = json.dumps(_metadata(backend, unique, version, built), indent=2) + "\n"
            _write(root / "build" / f"torch-{backend}", built)
    return ids


def _sources() -> dict[str, str]:
    """Path in the package -> source."""
    files = {"__init__.py": texts.INIT}
    for module, file in sources("fasttfm.layers", _LAYERS).items():
        where = place(module, file)
        files[where.as_posix()] = relative(file.read_text(encoding="utf-8"), where)
    files["functional/namespace.py"] = texts.NAMESPACE
    return files


def _metadata(backend: str, unique: str, version: int, files: dict[str, str]) -> dict:
    hashes = {name: hashlib.sha256(text.encode()).digest() for name, text in sorted(files.items())}
    return {
        "name": NAME,
        "id": unique,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(value).decode() for name, value in hashes.items()},
        },
    }


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
