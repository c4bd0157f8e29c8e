"""Installs fasttfm/ as `fasttfm` and kernels/ as `fasttfm.kernels`.

The kernels keep a room of their own at the top of the repository; they are installed inside the package because a
top-level module called `kernels` would collide with other distributions.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

# fasttfm/kernels is a link to kernels/, so that a checkout can be imported as it is and tools follow the imports; where
# links are not checked out as links, package_dir finds the kernels all the same.
packages = {*find_packages(include=["fasttfm", "fasttfm.*"])}
packages |= {"fasttfm.kernels", *(f"fasttfm.kernels.{name}" for name in find_packages("kernels"))}

folder = Path(__file__).parent
# A package index shows README without the files beside it: pictures go, and a link to a file becomes its text.
readme = re.sub(r"<img [^>]*>\n*", "", (folder / "README.md").read_text(encoding="utf-8"))
readme = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", readme)
version = re.search(r'^__version__ = "(.+)"$', (folder / "fasttfm" / "__init__.py").read_text(), re.MULTILINE)

extras = {
    "cpu": ["numba>=0.60"],  # searches and training on a CPU are faster with it
    "ctranslate2": ["ctranslate2>=4.5"],  # export to it; import needs nothing
    "onnx": ["onnx>=1.17; python_version >= '3.11'", "onnxscript>=0.5; python_version >= '3.11'"],
    "serve": ["starlette>=0.40", "uvicorn>=0.30", "prometheus_client>=0.20"],
    "plots": ["matplotlib>=3.8"],
    "tensorboard": ["tensorboard>=2.15"],
    "hf": ["transformers>=5.20"],  # replacements in its models; import of M2M-100 and NLLB; AutoModelForSeq2SeqLM
    "hub": ["kernels>=0.17"],  # loads what python -m scripts.hub writes
    "sentences": ["sentencex>=1.0"],  # translate --split-sentences
    "moses": ["sacremoses>=0.1.1"],  # models of fairseq with codes of fastBPE or subword-nmt; score --compound-split
    "completion": ["shtab>=1.7"],
    "bench": ["jsonschema>=4.18", "matplotlib>=3.8", "pandas>=2.2", "psutil>=5.9"],  # benchmarks/, not in the wheel
    "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"],  # make docs
    "trainers": ["accelerate>=1.1", "lightning>=2.4"],  # docs/trainers.md
    "notebooks": ["nbclient>=0.10", "ipykernel>=6.29", "matplotlib>=3.8"],
    "peers": ["einops>=0.8"],  # make peers: what other projects' tests import
    "zstd": ["backports.zstd; python_version < '3.14'"],
}
tools = [
    "pytest>=8.0",
    "pytest-xdist>=3.5",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "peft>=0.17",  # adapters in AutoModelForSeq2SeqLM
    "omegaconf>=2.3",  # the settings of fairseq's checkpoints
    "onnxruntime>=1.20; python_version >= '3.11'",
    "ruff>=0.8",
    "mypy>=1.11",
    "types-PyYAML",
    "types-requests",
    "types-tqdm",
]

setup(
    name="fasttfm",
    version=version[1],
    description="The encoder-decoder Transformer on fused Triton kernels: drop-in modules, training, translation",
    long_description=readme,
    long_description_content_type="text/markdown",
    author="fasttfm developers",
    keywords=["transformer", "triton", "attention", "machine translation", "cuda", "pytorch"],
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=sorted(packages),
    package_dir={"fasttfm": "fasttfm", "fasttfm.kernels": "kernels"},
    package_data={
        "fasttfm": ["py.typed", "**/*.yaml", "models/*.md", "translate/server/*.html"],
        "fasttfm.kernels.proof": ["*.csv"],
    },
    install_requires=[
        "torch>=2.9",
        "triton>=3.5; platform_system == 'Linux'",
        "numpy>=1.26",
        "sentencepiece>=0.2",
        "sacrebleu>=2.4",
        "safetensors>=0.4",
        "pyyaml>=6.0",
        "requests>=2.31",
        "tqdm>=4.65",
    ],
    extras_require={**extras, "dev": [*tools, *sorted({name for names in extras.values() for name in names})]},
    entry_points={"console_scripts": ["fasttfm = fasttfm.__main__:command"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
        "Typing :: Typed",
    ],
)
