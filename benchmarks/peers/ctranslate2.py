"""CTranslate2 with our weights, converted by fasttfm.convert.ctranslate2.

https://opennmt.net/CTranslate2/python/ctranslate2.Translator.html         translate_batch and its options
https://opennmt.net/CTranslate2/quantization.html                          compute_type
https://opennmt.net/CTranslate2/performance.html                           threads, batches

It runs in its own process. In PyTorch's it would share libgomp, whose threads stop spinning when a process has more
threads than cores: on two cores of an AMD EPYC with AVX2, one row took us 370 ms instead of 250, and CTranslate2 260
instead of 120.
"""

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.convert.ctranslate2 import SPECIAL, write
from fasttfm.data.tokenizer import BOS, PAD
from fasttfm.models import TransformerConfig
from fasttfm.system.children import end_with_parent


class Translate:
    """translate_batch() on id lists: K hypotheses of exactly `length` tokens for each source, best first."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Tensor],
        *,
        beam: int,
        length: int,
        compute_type: str,
        device: torch.device,
        threads: int,
        workers: int = 1,
    ) -> None:
        """weights: with torch.nn's names. workers: concurrent batches, each on `threads` threads."""
        self.words = [SPECIAL.get(i, str(i)) for i in range(config.vocab_size)]
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)
        with tempfile.TemporaryDirectory() as folder:
            write(config, weights, Path(folder), self.words, self.words)
            options = {"device": device.type, "compute_type": compute_type, "intra_threads": threads}
            self._process.submit(_load, folder, options | {"inter_threads": workers}).result()
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.options = {
            "beam_size": beam,
            "num_hypotheses": beam,
            "length_penalty": 0.0,
            "min_decoding_length": length,
            "max_decoding_length": length,
            "disable_unk": True,
            "suppress_sequences": [[SPECIAL[PAD]], [SPECIAL[BOS]]],
        }
        self.workers = workers

    def __call__(self, sources: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """sources: ids with end-of-sentence."""
        words = [[self.words[i] for i in source] for source in sources]
        size = 0 if self.workers == 1 else -(-len(words) // self.workers)  # 0: no limit
        result = self._process.submit(_translate, words, self.options | {"max_batch_size": size}).result()
        return [[[self.ids[word] for word in words] for words in hypotheses] for hypotheses in result]


_loaded: Any = None
"""The translator, in the child process."""


def _load(folder: str, options: dict[str, Any]) -> None:
    import ctranslate2

    global _loaded
    _loaded = ctranslate2.Translator(folder, **options)


def _translate(words: list[list[str]], options: dict[str, Any]) -> list[list[list[str]]]:
    return [result.hypotheses for result in _loaded.translate_batch(words, **options)]
