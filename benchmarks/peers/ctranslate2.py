"""CTranslate2 with our weights, written into its model format (fasttfm.interop.ctranslate2).

https://opennmt.net/CTranslate2/python/ctranslate2.Translator.html         translate_batch and its options
https://opennmt.net/CTranslate2/quantization.html                          compute_type
https://opennmt.net/CTranslate2/performance.html                           threads, batches
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fasttfm.data.tokenizer import BOS, PAD
from fasttfm.interop.ctranslate2 import SPECIAL, write
from fasttfm.models import TransformerConfig


class Translate:
    """translate_batch() on id lists: K hypotheses of exactly `length` tokens for each source, the best first."""

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
        """weights: by torch.nn's names. workers: batches translated at once, each with so many threads."""
        import ctranslate2

        self.words = [SPECIAL.get(i, str(i)) for i in range(config.vocab_size)]
        with tempfile.TemporaryDirectory() as folder:
            write(config, weights, Path(folder), self.words, self.words)
            self.translator = ctranslate2.Translator(
                folder, device=device.type, compute_type=compute_type, intra_threads=threads, inter_threads=workers
            )
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
        size = 0 if self.workers == 1 else -(-len(words) // self.workers)  # 0: the whole batch at once
        result = self.translator.translate_batch(words, max_batch_size=size, **self.options)
        return [[[self.ids[word] for word in words] for words in each.hypotheses] for each in result]
