"""Group training_step: forward, backward and optimizer of whole models, at 60, 20 and 5% padding and without any.

On a GPU paper-base and paper-big on 25,000 cells a side; on a CPU the multi30k preset, and paper-base on few with
--full. The cells (rows times width) are the same for every share of padding, so the throughput, in target tokens that
are not padding, says what padding costs each provider. Steps run in the dtype that was asked for, else in that of the
presets: on a CPU bfloat16 where it has units for it, else float32.

The check: the same weights and no dropout give the same loss a token and the same gradient norm, in float64 by
torch.nn. What is counted against the roofline is the fused step on the tokens that are not padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.cases import synthetic
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import (
    COMPILE,
    CUDA_GRAPH,
    HUGGING_FACE,
    OURS,
    TORCH_GRAPH,
    TORCH_NN,
    Absent,
    Provider,
    provider,
)
from benchmarks.peers import huggingface, torch_nn
from benchmarks.peers.torch_nn import Step, TorchTransformer
from fasttfm.config.presets import preset_section
from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost, Shape
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.system.graphs import Graphs
from fasttfm.training.graphs import run_on_batch
from fasttfm.training.optimization import Optimization, rate_dtype
from fasttfm.training.workers import Workers

Model = TypeVar("Model", bound=nn.Module)
Loss = Callable[..., Tensor]
"""Of a model, a batch and the label smoothing."""
PADDING = (0.6, 0.2, 0.05, 0.0)
PACKED = f"{OURS}, packed"
"""The layers see tokens alone (fasttfm train --packed)."""
LENGTH = 37
"""sum(l^2) / sum(l) over sentences of about 27 tokens, longer than their mean: what attention's cost goes with."""
_LR = 1e-4
_CHECKED = 2_048


def cases(setting: Setting) -> list[Case]:
    """Every model, size and share of padding that the level asks for."""
    full, quick = setting.at_least("full"), not setting.at_least("standard")
    if setting.on_gpu:
        sizes = [("paper-base", 500, 50), *([] if quick else [("paper-big", 500, 50)])]
    elif setting.level == "smoke":
        sizes = [("multi30k", 4, 12)]
    else:
        sizes = [("multi30k", 32, 32) if quick else ("multi30k", 128, 32), *([("paper-base", 16, 32)] if full else [])]
    shares = (0.6, 0.05, 0.0) if quick else PADDING
    return [
        _case(setting, preset, rows, width, share)
        for preset, rows, width in sizes
        for share in (shares if setting.on_gpu or preset == "multi30k" else (0.6, 0.05))
    ]


def precision(setting: Setting) -> torch.dtype:
    """Return the dtype of matrix products."""
    return setting.training_dtype or setting.dtype


def model_config(preset: str) -> TransformerConfig:
    """The preset's model with the vocabulary that it is meant for."""
    vocabulary = 37_000 if preset.startswith("paper") else 8_000
    return TransformerConfig(**{**preset_section(preset, "model"), "vocab_size": vocabulary})


def training_config(preset: str, precision: torch.dtype) -> TrainingConfig:
    """The preset's optimizer, with a constant learning rate that changes little in a few steps."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return TrainingConfig(**{**preset_section(preset, "training"), "precision": names[precision], "lr": _LR})


def cost(config: TransformerConfig, *, tokens: int, length: int = LENGTH) -> Cost:
    """Everything that the fused step does on as many source and target tokens in sentences of a length, in halves."""
    shape = Shape(
        d_model=config.d_model,
        heads=config.heads,
        d_ff=config.d_ff,
        vocabulary=config.vocab_size,
        layers=config.encoder_layers,
    )
    pieces = costs.training_step(shape, tokens=tokens, length=length, size=2).values()
    return sum((piece for part in pieces for piece in part), start=Cost())


class Contenders:
    """The steps of a preset's training, each on a model of its own with the same weights."""

    def __init__(self, preset: str, setting: Setting) -> None:
        self.device, dtype = setting.device, precision(setting)
        self.config, self.training = model_config(preset), training_config(preset, dtype)
        self.autocast = None if dtype == torch.float32 else dtype
        torch.manual_seed(setting.seed)
        self.weights = TorchTransformer(self.config).state_dict()

    def model(self, kind: type[Model]) -> Model:
        """A new model on the device."""
        return loaded(kind, self.config, self.weights, self.device)

    def ours(self, **options: bool) -> "OurStep":
        """fasttfm's step; options: of OurStep."""
        return OurStep(self.model(Transformer), self.training, self.device, self.autocast, **options)

    def theirs(self, **options: bool) -> Step:
        """torch.nn's step; options: of Step."""
        return Step(self.model(TorchTransformer), torch_nn.loss, self.training, self.autocast, **options)

    def steps(self) -> dict[str, Any]:
        """Steps by provider."""
        return {OURS: self.ours(), PACKED: self.ours(packed=True), TORCH_NN: self.theirs()}

    def loss(self, model: nn.Module, loss: Loss) -> "Checked":
        """The loss of a model, which is what is compared."""
        return Checked(model.eval(), partial(loss, label_smoothing=self.training.label_smoothing), self.autocast)

    def losses(self) -> dict[str, "Checked"]:
        """Losses of the models of the steps, by provider."""
        return {
            OURS: self.loss(self.model(Transformer), our_loss),
            PACKED: self.loss(self.model(Transformer), partial(our_loss, packed=True)),
            TORCH_NN: self.loss(self.model(TorchTransformer), torch_nn.loss),
        }

    def exact_loss(self) -> "Checked":
        """The right answer of losses(), in float64."""
        return replace(self.loss(self.model(TorchTransformer).double(), torch_nn.loss), autocast=None)


@dataclass(frozen=True)
class Checked:
    """The loss a target token, without dropout and without a step."""

    model: nn.Module
    loss: Loss
    autocast: torch.dtype | None

    def __call__(self, batch: Batch) -> Tensor:
        with torch.autocast(batch.source.device.type, self.autocast, enabled=self.autocast is not None):
            return self.loss(self.model, batch) / batch.target_tokens

    def with_gradient(self, batch: Batch) -> list[Tensor]:
        """The loss of the batch's head, and the norm of its gradient in all parameters."""
        value = self(head(batch))
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norms = [g.double().norm() for g in torch.autograd.grad(value, parameters)]
        return [value.detach().double(), torch.stack(norms).norm()]


def _case(setting: Setting, preset: str, rows: int, width: int, padding: float) -> Case:
    config = model_config(preset)
    tokens = round(rows * width * (1.0 - padding))

    def inputs(i: int) -> tuple[Batch]:
        made = synthetic.batch(rows, width, padding, config.vocab_size, seed=1_000 * setting.seed + i)
        return (made.to(setting.device),)

    def make() -> Work:
        those, device = Contenders(preset, setting), setting.device
        compiled = Absent("left out of --quick: it compiles for minutes; run without --quick")
        providers = those.steps()
        providers[COMPILE] = those.theirs(compiled=True) if setting.at_least("standard") else compiled
        checked: dict[str, Any] = {name: loss.with_gradient for name, loss in those.losses().items()}
        checked[COMPILE] = checked[TORCH_NN]  # the same module: what torch.compile makes of it is torch's own to check
        if setting.on_gpu:
            providers[CUDA_GRAPH] = Graphed(those.ours(captured=True), device)
            checked[CUDA_GRAPH] = checked[OURS]  # the same passes: tests/gpu/test_graphs.py holds replays against them
            providers[TORCH_GRAPH] = Graphed(those.theirs(captured=True), device)
            checked[TORCH_GRAPH] = checked[TORCH_NN]
        if not config.norm_first:

            def step() -> Provider:
                marian = huggingface.marian(config, those.weights, dropout=config.dropout).to(device)
                return Step(marian, huggingface.loss, those.training, those.autocast)

            def loss() -> Provider:
                marian = huggingface.marian(config, those.weights).to(device)
                return those.loss(marian, huggingface.loss).with_gradient

            providers[HUGGING_FACE] = provider(HUGGING_FACE, device, step)
            checked[HUGGING_FACE] = provider(HUGGING_FACE, device, loss)
        return Work(
            inputs=inputs,
            providers=providers,
            without_dropout=checked,
            reference=those.exact_loss().with_gradient,
            plain=TORCH_NN,
            unit="target tokens/s",
            units=lambda batch: float(batch.target_tokens),
            rounds=5 if preset.startswith("paper") and not setting.on_gpu else None,  # seconds each
        )

    return Case(
        group="training_step",
        name=preset,
        shape={"rows": rows, "width": width, "padding": padding, "vocabulary": config.vocab_size},
        dtype=str(precision(setting)).removeprefix("torch."),
        passes="step",
        cost=cost(config, tokens=tokens, length=min(width, tokens)),
        make=make,
    )


def loaded(kind: type[Model], config: TransformerConfig, weights: dict[str, Tensor], device: torch.device) -> Model:
    """A new model with these weights on the device."""
    model = kind(config)
    model.load_state_dict(weights)
    return model.to(device)


class OurStep:
    """fasttfm's training step as its Trainer runs it."""

    def __init__(
        self,
        model: Transformer,
        training: TrainingConfig,
        device: torch.device,
        autocast: torch.dtype | None,
        *,
        packed: bool = False,
        captured: bool = False,
    ) -> None:
        self.packed = packed
        self.model = model.train()
        self.optimization = Optimization(model, training, device, Workers(), captured=captured)
        self.device, self.autocast = device, autocast
        self.label_smoothing = training.label_smoothing
        self._lr = torch.full((), training.lr, dtype=rate_dtype(device), device=device)

    def __call__(self, batch: Batch, divisor: Tensor | None = None) -> Tensor:
        """The loss a target token before the step, 0-d without gradient; divisor: as torch_nn.Step takes it."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = our_loss(self.model, batch, self.label_smoothing, packed=self.packed)
            loss = loss / (batch.target_tokens if divisor is None else divisor)
        self.optimization.backward(loss)
        self.optimization.step(self._lr)
        return loss.detach()


class Graphed:
    """A step as one CUDA graph for each shape (fasttfm train)."""

    def __init__(self, step: Callable[..., Tensor], device: torch.device) -> None:
        self._step, self._graphs = step, Graphs(device, "a step", "leave it out")
        self._tokens, self._loss = torch.zeros(2, device=device)

    def __call__(self, batch: Batch) -> Tensor:
        self._tokens.fill_(batch.target_tokens)
        run_on_batch(self._graphs, self._run, batch)
        return self._loss.clone()

    def held_bytes(self) -> int:
        """Memory that each step uses and none allocates."""
        return self._graphs.held_bytes()

    def _run(self, batch: Batch) -> None:
        self._loss.copy_(self._step(batch, divisor=self._tokens))


def our_loss(model: Transformer, batch: Batch, label_smoothing: float, *, packed: bool = False) -> Tensor:
    return model.batch_loss(batch, label_smoothing=label_smoothing, packed=packed)[0]


def head(batch: Batch) -> Batch:
    """The first rows, as many as have _CHECKED cells a side: float64 logits of a whole batch would fill a GPU."""
    rows = max(1, _CHECKED // max(batch.source.shape[1], batch.target_in.shape[1]))
    tensors: dict[str, Any] = {
        name: getattr(batch, name)[:rows]
        for name in ("source", "source_lengths", "target_in", "target_out", "target_lengths")
    }
    counts: dict[str, Any] = {f"{side}_tokens": int(tensors[f"{side}_lengths"].sum()) for side in ("source", "target")}
    return Batch(**tensors, **counts)
