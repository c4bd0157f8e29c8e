"""Text continuation with a key/value cache: the prompt is processed once, then one position per new token.

Text longer than the model's learned positions slides: its last half context is processed again from position 0, and
earlier tokens are dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fasttfm.errors import UserError
from fasttfm.models.cache import DecoderCache
from fasttfm.search.batches import inference
from fasttfm.search.greedy import draw_tokens
from fasttfm.search.hypotheses import NOT_A_NUMBER
from fasttfm_pretraining.config.sampling import Sampling

if TYPE_CHECKING:
    from fasttfm_pretraining.data.text_tokenizer import TextTokenizer
    from fasttfm_pretraining.models.language_model import LanguageModel


def continue_ids(
    model: LanguageModel,
    prompt: Sequence[int],
    most: int,
    samples: int,
    sampling: Sampling,
    end: int | None,
    never: Sequence[int] = (),
) -> list[list[int]]:
    """Sample `samples` continuations of a prompt (at least one token), each of at most `most` tokens, without `end`.

    A continuation ends at `end`; tokens in `never` are excluded. Draws depend on the seed and the continuation's index.
    Prompts longer than the model's positions keep their end. Raises UserError for NaN probabilities.
    """
    positions = model.config.max_length
    half = max(1, positions // 2)
    seen = list(prompt)[-positions:]
    uniform = np.stack([np.random.default_rng([sampling.seed, n]).random(most, np.float32) for n in range(samples)])
    config, texts = sampling.decoding(), [list[int]() for _ in range(samples)]
    with inference(model) as device:
        capacity = min(len(seen) + most, positions)
        cache = DecoderCache(capacity)
        logits = model.step(torch.tensor([seen], device=device), cache)
        rows = torch.zeros(samples, dtype=torch.int64, device=device)
        cache.reorder(rows)
        logits, alive = logits[rows], list(range(samples))
        for step in range(most):
            if logits.isnan().any():
                raise UserError(NOT_A_NUMBER)
            logits[:, never] = -torch.inf
            draws = torch.from_numpy(uniform[alive, step]).to(device)
            tokens = draw_tokens(logits.log_softmax(1), draws, config)
            drawn = tokens.tolist()
            staying = [index for index, token in enumerate(drawn) if token != end]
            for index in staying:
                texts[alive[index]].append(drawn[index])
            if not staying or step == most - 1:
                break
            if len(staying) < len(drawn):
                kept = torch.tensor(staying, device=device)
                cache.reorder(kept)
                tokens, alive = tokens[kept], [alive[index] for index in staying]
            if cache.length < positions:
                logits = model.step(tokens[:, None], cache)
            else:
                cache = DecoderCache(capacity)
                recent = [[*seen, *texts[row]][-half:] for row in alive]
                logits = model.step(torch.tensor(recent, device=device), cache)
    return texts


def generate(
    model: LanguageModel, tokenizer: TextTokenizer, prompt: str, most: int, samples: int, sampling: Sampling
) -> list[str]:
    """Sample texts that begin with a prompt (may be empty) and continue for at most `most` tokens.

    The start-of-document token is prepended, as in training. Warns if the text may exceed the model's positions.
    Raises UserError as continue_ids(), and for numbers below 1.
    """
    for flag, number in (("--tokens", most), ("--samples", samples)):
        if number < 1:
            raise UserError(f"{flag} {number}: at least 1 is needed")
    ids, positions = tokenizer.encode(prompt), model.config.max_length
    if len(ids) + most > positions:
        message = (
            f"a prompt of {len(ids):,} tokens and {most:,} new ones outgrow the model's {positions:,} positions: "
            f"past them a text goes on from its last {max(1, positions // 2):,} tokens or more"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    never = tokenizer.textless(model.config.vocab_size)
    continuations = continue_ids(model, [tokenizer.begin, *ids], most, samples, sampling, tokenizer.end, never)
    return [tokenizer.decode([*ids, *continuation]) for continuation in continuations]
