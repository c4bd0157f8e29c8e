"""A translation as it is written: token by token, text by text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fasttfm.config.decoding import DecodingConfig
from fasttfm.data.tokenizer import BOS, EOS, Tokenizer
from fasttfm.decoding.batches import LENGTHS, inference, padded
from fasttfm.decoding.hypotheses import NOT_A_NUMBER, Constraints
from fasttfm.decoding.largest import likeliest
from fasttfm.decoding.selection import allowed_tokens, compute_allowed
from fasttfm.decoding.stepwise import draw_tokens
from fasttfm.errors import UserError


def stream_ids(
    model: Any,
    source: Sequence[int],
    config: DecodingConfig,
    *,
    prefix: Sequence[int] = (),
    number: int = 0,
    banned: Sequence[Sequence[int]] = (),
    allowed: Sequence[int] | None = None,
) -> Iterator[int]:
    """The tokens of what search_ids finds with beam 1, or with sampling and nbest 1, as they are chosen.

    source: ids with end-of-sentence; number: what sampling takes its random numbers from besides the seed; banned,
    allowed: as of search_ids, for this source. Between two
    tokens no mode of PyTorch or of the model is changed. Raises ValueError for a config that keeps several hypotheses,
    UserError for a model whose weights give no probabilities.
    """
    rows = config.nbest if config.sampling else config.beam
    if rows != 1 or config.mbr_samples or config.coverage_penalty:
        raise ValueError("only one hypothesis can be streamed: set beam=1, or sampling=True with nbest=1")
    return _stream(model, source, config, prefix, number, banned, allowed_tokens([allowed], [prefix]))


def _stream(
    model: Any, source: Sequence[int], config: DecodingConfig, prefix: Sequence[int], number: int,
    banned: Sequence[Sequence[int]], allowed: list[torch.Tensor] | None,
) -> Iterator[int]:  # fmt: skip
    limit = max(config.longest_output(len(source) - 1), len(prefix))
    uniform = np.random.default_rng([config.sampling_seed, number]).random(limit + 1).astype(np.float32)
    with inference(model, batch_invariant=config.batch_invariant) as device:
        constraints = Constraints([limit], [list(prefix)], config, device, banned, allowed)
        ids, lengths = padded([source], device, LENGTHS if config.batch_invariant else 1)
        known = lengths if config.batch_invariant or ids.shape[1] > len(source) else None
        cache = model.start_cache(model.encode(ids, known), known, rows_per_sentence=1, max_length=limit + 1)
        compute_allowed(cache, allowed)
    written: list[int] = []
    while True:
        with inference(model, batch_invariant=config.batch_invariant):
            tokens = torch.tensor([written[-1] if written else BOS], device=device)
            logits = model.step(tokens, cache)
            constraints.exclude(logits, [0])
            history = torch.tensor([written], dtype=torch.int64)

            def forbid(values: torch.Tensor, history: torch.Tensor = history) -> None:
                constraints.apply(values, history, [0])

            if config.sampling:
                log_probabilities = logits.log_softmax(dim=1)
                forbid(log_probabilities)
                draw = torch.from_numpy(uniform[len(written) : len(written) + 1]).to(device)
                token = int(draw_tokens(log_probabilities, draw, config))
                probability = float(log_probabilities[0, token])
            else:
                (probability,), (token,) = (each[0].tolist() for each in likeliest(logits, 1, forbid))
            if math.isnan(probability):
                raise UserError(NOT_A_NUMBER)
        if token == EOS:
            return
        written.append(token)
        yield token


def stream_text(ids: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Pieces of text that together are the decoded ids as one line; a character in bytes comes when it is whole."""
    written: list[int] = []
    sent = text = ""
    for token in ids:
        written.append(token)
        text = " ".join(tokenizer.decode(written).splitlines())
        whole = text.rstrip("\ufffd")  # what a beginning of a character is decoded to
        if len(whole) > len(sent):
            yield whole[len(sent) :]
            sent = whole
    if text != sent:
        yield text[len(sent) :]
