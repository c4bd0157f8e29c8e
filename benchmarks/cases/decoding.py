"""Group decoding: whole translations, batch 1 to 128, beam 1, 4 and 8; ours, Hugging Face's and CTranslate2's.

On a CPU also short and long sentences, a large vocabulary, and SiLU, the activation of OPUS-MT's models.

The model is paper-base with the same random weights for all providers. Every search takes exactly `length` decoder
steps, because a random model never ends; throughput is target tokens/s. Our last step is the end-of-sentence token, the
peers' is one more word.

Weights are normally distributed, like trained ones: with uniform weights, as initialized, CTranslate2's int8 overflows
on processors without VNNI, where it adds two products in 16 bits. The last weight of every sublayer is halved, so that
the next word depends on the previous ones: outputs vary, and ties are rare. Special tokens embed to zero, so that
forbidding them before or after the softmax is the same.

The check compares all K hypotheses with a float64 search by fasttfm for the same number of words. The error is the mean
over sentences of |log p(found) - log p(expected)| / |log p(expected)|, summed over hypotheses; 0 if they are equal.
float32 allows 1e-5 (a tie decided by rounding). Lower precision, where other words may win, allows 0.05 on the best
hypothesis of the first sentences.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.cases import synthetic
from benchmarks.cases.training_step import loaded, model_config
from benchmarks.measure import providers as peers
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import Absent, Provider
from benchmarks.peers import ctranslate2, huggingface
from fasttfm.data.tokenizer import BOS
from fasttfm.kernels.proof.costs import Cost
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, search_ids
from fasttfm.search.batches import SHORTEST, multiply_in_int8, padded
from fasttfm.search.device.search import held_bytes
from fasttfm.search.search import search_workers
from fasttfm.system.machine import multiplies_bfloat16

Hypotheses = list[list[list[int]]]
"""K hypotheses for each sentence, without BOS and EOS."""
Expected = dict[int, Hypotheses]
"""Number of words -> hypotheses of that length."""
SOURCE = 27
"""Source tokens with end-of-sentence: the mean of WMT14 English-German."""
_OTHER_LENGTHS = (8, 60)
"""Tokens of short and long sentences, on both sides."""
_VOCABULARY, _LARGE_VOCABULARY = 8_000, 32_000
"""Vocabulary on CPUs; on GPUs paper-base's own."""
WORKERS = ", a worker a core"
"""Suffix of providers with one worker per core, each searching its own batches."""
NOT_INVARIANT = "fasttfm, not batch-invariant"
"""Our search without batch invariance, which shows its cost."""
INT8 = f"{peers.OURS} int8"
"""Our search with 8-bit products, also timed beside bfloat16."""
_ALL = 1 << 30
"""batch_tokens for a single batch."""
_ALLOWED = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.05, "int8": 0.05}
_LOSSY = 32
"""Number of sentences compared below float32. Single ones may be far off, so the mean must not be over a few."""


def cases(setting: Setting) -> list[Case]:
    """Cases of all batches, beams and dtypes of the level."""
    smoke, quick, full = setting.level == "smoke", not setting.at_least("standard"), setting.at_least("full")
    length = 4 if smoke else 8 if quick and not setting.on_gpu else SOURCE
    batches = (2,) if smoke else (1, 32) if quick else (1, 8, 32)
    if full or (setting.on_gpu and not smoke):
        batches = (*batches, 128)
    beams = (1, 4) if quick else (1, 4, 8)
    dtypes = [setting.dtype]
    if not setting.on_gpu and setting.dtype == torch.float32:  # CPUs are faster in lower precision
        dtypes.append(torch.bfloat16 if multiplies_bfloat16(setting.device) else torch.int8)
    result = []
    for batch in batches:
        for beam in beams[-1:] if quick and batch > 32 else beams:
            few = quick and (batch, beam) != (batches[-1], 4)
            result += [_case(setting, dtype, batch, beam, length) for dtype in (dtypes[:1] if few else dtypes)]
    if not (quick or setting.on_gpu):
        for batch, dtype in itertools.product((1, 32), dtypes):
            result += [_case(setting, dtype, batch, 4, length, source=length) for length in _OTHER_LENGTHS]
            result.append(_case(setting, dtype, batch, 4, SOURCE, vocabulary=_LARGE_VOCABULARY))
        result += [_case(setting, dtype, 8, 4, length, activation="silu") for dtype in dtypes]
    return result


def _config(setting: Setting, vocabulary: int, **changes: Any) -> TransformerConfig:
    config = model_config("paper-base")
    changes |= {"dropout": 0.0} | ({} if setting.on_gpu else {"vocab_size": vocabulary})
    if setting.level == "smoke":
        changes |= {"vocab_size": 200, "d_model": 64, "heads": 2, "d_ff": 128, "encoder_layers": 1, "decoder_layers": 2}
    return dataclasses.replace(config, **changes)


@functools.lru_cache(maxsize=1)
def random_model(config: TransformerConfig, seed: int) -> Transformer:
    """A random float32 model on the CPU whose outputs vary."""
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embedding" not in name:
                share = 0.5 if name.endswith(("out_proj.weight", "linear2.weight")) else 1.0
                weight.normal_(std=share * weight.std().item())
        model.decoder.layers[-1].norm3.weight.normal_()
        model.target_embedding.weight[:4] = 0.0
    return model


def _case(
    setting: Setting, dtype: torch.dtype, batch: int, beam: int, length: int,
    *, source: int = SOURCE, vocabulary: int = _VOCABULARY, activation: str = "relu",
) -> Case:  # fmt: skip
    config = _config(setting, vocabulary, activation=activation)
    dtype_name = str(dtype).removeprefix("torch.")

    def make() -> Work:
        exact = exact_model(config, setting.seed, setting.device)
        # one worker with all cores, and one worker per core
        counts = [1] + [setting.threads] * (setting.threads > 1 and batch > 1 and not setting.on_gpu)
        providers = _ours(config, dtype, batch, beam, length, source, counts, setting)
        providers |= _peers(config, dtype, beam, length, counts, setting)
        return Work(
            inputs=lambda i: (synthetic.sources(batch, source, config.vocab_size, seed=1_000 * setting.seed + i),),
            providers=providers,
            reference=lambda sources: (sources, expected(exact, beam, length, tuple(map(tuple, sources)))),
            error=partial(error, exact) if dtype == torch.float32 else partial(error, exact, sentences=_LOSSY, best=1),
            allowed=_ALLOWED[dtype_name],
            unit="target tokens/s",
            units=lambda sources: float(batch * length),
            warm_up=2 if setting.on_gpu else 0,  # on a CPU the first call and the check are enough
            rounds=setting.rounds_of_long_runs,
        )

    return Case(
        group="decoding",
        name="paper-base" if activation == "relu" else f"paper-base, {activation}",
        shape={"batch": batch, "beam": beam, "source": source, "length": length, "vocabulary": config.vocab_size},
        dtype=dtype_name,
        passes="decode",
        cost=search_cost(config, batch=batch, beam=beam, source=source, length=length, size=dtype.itemsize),
        make=make,
    )


def search_cost(config: TransformerConfig, *, batch: int, beam: int, source: int, length: int, size: int) -> Cost:
    """Minimum cost of a search: all products, decoder weights once per step, both caches as far as they are filled."""
    d, layers, F, V = config.d_model, config.decoder_layers, config.d_ff, config.vocab_size
    sources, rows = batch * source, batch + batch * beam * (length - 1)  # the first step has one row per sentence
    encoder, decoder = config.encoder_layers * (4 * d * d + 2 * d * F), layers * (6 * d * d + 2 * d * F) + V * d
    cross = layers * 2 * d * d
    flops: float = 2 * (sources * (encoder + cross) + rows * decoder)
    flops += 4 * config.encoder_layers * sources * source * d + 4 * layers * rows * d * (source + length / 2)
    caches = layers * 2 * d * (length * sources + rows * length / 2)
    return Cost(flops=int(flops), bytes=int(size * (encoder + cross + length * decoder + caches)))


def _ours(
    config: TransformerConfig, dtype: torch.dtype, batch: int, beam: int, length: int, source: int,
    counts: Sequence[int], setting: Setting,
) -> dict[str, Provider | Absent]:  # fmt: skip
    # on a GPU the first runs build an engine for this batch size, which the model keeps
    tokens = batch * max(source, SHORTEST) if setting.on_gpu else _ALL
    search = partial(Ours, beam=beam, length=length, batch_tokens=tokens)

    weights = random_model(config, setting.seed).state_dict()
    result: dict[str, Provider | Absent] = {}
    if dtype != torch.int8:
        plain = loaded(Transformer, config, weights, setting.device).to(dtype).eval()
        result |= {_named(peers.OURS, count): search(plain, workers=count) for count in counts}
        if not setting.on_gpu:
            result[NOT_INVARIANT] = search(plain, batch_invariant=False)
    if dtype != torch.float32 and not setting.on_gpu:
        in_int8 = loaded(Transformer, config, weights, setting.device).eval()
        multiply_in_int8(in_int8)
        result |= {_named(INT8, count): search(in_int8, workers=count) for count in counts}
    return result


def _named(provider: str, workers: int) -> str:
    return f"{provider}{WORKERS}" if workers > 1 else provider


@functools.lru_cache(maxsize=1)
def exact_model(config: TransformerConfig, seed: int, device: torch.device) -> Transformer:
    """random_model() in float64 on the device."""
    return loaded(Transformer, config, random_model(config, seed).state_dict(), device).double().eval()


@functools.lru_cache(maxsize=1)
def expected(exact: Transformer, beam: int, length: int, sources: tuple[tuple[int, ...], ...]) -> Expected:
    """Hypotheses after `length` steps of ours and of a peer; cached for the next case, in lower precision."""
    return {steps - 1: Ours(exact, beam=beam, length=steps)(sources) for steps in (length, length + 1)}


def _peers(
    config: TransformerConfig, dtype: torch.dtype, beam: int, length: int, counts: Sequence[int], setting: Setting
) -> dict[str, Provider | Absent]:
    device, result = setting.device, dict[str, Provider | Absent]()
    weights = random_model(config, setting.seed).state_dict()

    def generate(*, static: bool = False) -> Provider:
        model = huggingface.marian(config, weights).to(device=device, dtype=dtype)
        return huggingface.Generate(model, beam, length, static=static)

    if dtype != torch.int8:
        result[peers.HUGGING_FACE] = peers.provider(peers.HUGGING_FACE, device, generate)
        if setting.on_gpu:
            static = peers.provider(peers.HUGGING_FACE, device, partial(generate, static=True))
            result[peers.HUGGING_FACE_STATIC] = static
    # CTranslate2 has bfloat16 only on GPUs; its reduced precision on CPUs is int8
    name, kind = peers.CTRANSLATE2, str(dtype).removeprefix("torch.")
    if dtype != torch.float32 and not setting.on_gpu:
        name, kind = f"{peers.CTRANSLATE2} int8", "int8"
    options: dict[str, Any] = {"beam": beam, "length": length, "compute_type": kind, "device": device}
    for count in counts:
        workers: dict[str, Any] = {"threads": setting.threads // count, "workers": count}
        make = partial(ctranslate2.Translate, config, weights, **options, **workers)
        result[_named(name, count)] = peers.provider(peers.CTRANSLATE2, device, make)
    return result


class Ours:
    """fasttfm's search on id lists with `length` steps: K hypotheses of length - 1 words for each source."""

    def __init__(
        self, model: Transformer, *, beam: int, length: int, batch_invariant: bool = True, workers: int = 1,
        batch_tokens: int = _ALL,
    ) -> None:  # fmt: skip
        self.model, self.workers = model, search_workers(model, workers)
        limits: dict[str, Any] = {"min_len": length - 1, "max_len_a": 0.0, "max_len_b": length - 1}
        options: dict[str, Any] = {"batch_tokens": batch_tokens, "batch_invariant": batch_invariant}
        self.config = DecodingConfig(beam=beam, nbest=beam, length_penalty="none", **limits, **options)

    def __call__(self, sources: Sequence[Sequence[int]]) -> Hypotheses:
        result = search_ids(self.model, sources, self.config, workers=self.workers)
        return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in result]

    def held_bytes(self) -> int:
        """Memory that the model keeps for searches on a GPU."""
        return held_bytes(self.model)


def error(
    exact: Transformer, result: Hypotheses, expected: tuple[Sequence[Sequence[int]], Expected],
    *, sentences: int | None = None, best: int | None = None,
) -> float:  # fmt: skip
    """Error as defined at the top of this file. exact: the float64 model. sentences, best: compare only the first."""
    sources, by_length = expected
    words = {len(tokens) for hypotheses in result for tokens in hypotheses}
    right = by_length.get(words.pop()) if len(words) == 1 else None
    if right is None or list(map(len, result)) != list(map(len, right)):
        return float("inf")
    compared = list(zip(sources, result, right))[:sentences]
    total = 0.0
    for source, ours, theirs in compared:
        ours, theirs = ours[:best], theirs[:best]
        if {*map(tuple, ours)} != {*map(tuple, theirs)}:
            reference = log_probability(exact, source, theirs)
            total += abs(log_probability(exact, source, ours) - reference) / abs(reference)
    return total / len(compared)


@torch.no_grad()
def log_probability(model: Transformer, source: Sequence[int], hypotheses: list[list[int]]) -> float:
    """Sum over hypotheses of one length; -inf if their lengths differ."""
    if len(set(map(len, hypotheses))) != 1:
        return -float("inf")
    device = model.output.weight.device
    ids, lengths = padded([source] * len(hypotheses), device)
    tokens = torch.tensor([[BOS, *words] for words in hypotheses], device=device)
    logits = model(ids, tokens[:, :-1], lengths).log_softmax(dim=2)
    return float(logits.gather(2, tokens[:, 1:, None]).sum())
