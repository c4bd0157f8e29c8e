"""Group training_step: forward, backward and optimizer of whole models, at 60, 20, 5 and 0% padding.

On a GPU paper-base and paper-big on 25,000 cells per side; on a CPU the multi30k preset, and a small paper-base with
--full. The number of cells (rows times width) is the same for each share of padding, so the throughput, in target
tokens without padding, shows its cost for each provider. Steps run in --dtype, else in the presets' dtype: on a CPU
bfloat16 if it has units for it, else float32.

The check compares the loss per token and the gradient norm, with equal weights and no dropout, with torch.nn's in
float64. The roofline is of the fused step on the tokens without padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.cases import synthetic
from benchmarks.measure import providers as peers
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import Absent, Provider
from benchmarks.peers import huggingface, torch_nn
from benchmarks.peers.torch_nn import Step, TorchTransformer
from fasttfm.config.presets import preset_section
from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.system.graphs import Graphs
from fasttfm.training.graphs import run_on_batch
from fasttfm.training.optimization import Optimization, rate_dtype
from fasttfm.training.workers import Workers

Model = TypeVar("Model", bound=nn.Module)
Loss = Callable[..., Tensor]
"""Function of a model, a batch and the label smoothing."""
PADDING = (0.6, 0.2, 0.05, 0.0)
PACKED = f"{peers.OURS}, packed"
"""Layers without padding (fasttfm train --packed)."""
LENGTH = 37
"""sum(l^2) / sum(l) over sentences of about 27 tokens, to which attention's cost is proportional."""
_LR = 1e-4
_CHECKED = 2_048


def cases(setting: Setting) -> list[Case]:
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


def model_config(preset: str) -> TransformerConfig:
    """The preset's model with its usual vocabulary size."""
    vocabulary = 37_000 if preset.startswith("paper") else 8_000
    return TransformerConfig(**{**preset_section(preset, "model"), "vocab_size": vocabulary})


def training_config(preset: str, precision: torch.dtype) -> TrainingConfig:
    """The preset's optimizer with a small constant learning rate."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return TrainingConfig(**{**preset_section(preset, "training"), "precision": names[precision], "lr": _LR})


def cost(config: TransformerConfig, *, tokens: int, length: int = LENGTH) -> Cost:
    """Cost of the fused step on `tokens` source and target tokens, in half precision; length: see LENGTH."""
    return sum(pieces(config, tokens, length), start=Cost())


def pieces(config: TransformerConfig, tokens: int, length: int) -> list[Cost]:
    """Costs of the launches of one step of a post-norm model with equally many layers a side and one table.

    Dropout as in the paper, on sub-layers and embeddings. Adam works on float32; biases and norms are negligible.
    """
    d, layers, d_ff, vocabulary, size = config.d_model, config.encoder_layers, config.d_ff, config.vocab_size, 2
    sentences = (tokens // length, config.heads, length, length, d // config.heads, size)

    def product(inputs: int, outputs: int, *, bias: bool = True) -> list[Cost]:
        return [
            costs.linear(tokens, inputs, outputs, size),
            costs.linear_backward(tokens, inputs, outputs, size, bias=bias),
        ]

    # a causal tile of this length is computed whole
    attend = [attention(*sentences, causal=False) for attention in (costs.attention, costs.attention_backward_short)]
    join = [
        costs.residual_layer_norm(tokens, d, size),
        costs.residual_layer_norm_backward(tokens, d, size, dropout=True),
    ]
    embed = [costs.embedding(tokens, d, size), costs.embedding_backward(tokens, d, vocabulary, size)]
    self_attention, cross_attention = product(d, 3 * d) + product(d, d), product(d, d) + product(d, 2 * d)
    return [
        *product(d, vocabulary, bias=False),
        costs.cross_entropy(tokens, vocabulary, size),
        *(3 * layers * attend),
        *(5 * layers * join),
        *(2 * layers * (product(d, d_ff) + product(d_ff, d))),
        *(layers * (2 * self_attention + cross_attention + product(d, d))),
        *(2 * embed),
        costs.adam(vocabulary * d + layers * (12 * d * d + 4 * d * d_ff)),
    ]


class Contenders:
    """Training steps of a preset, each on its own model with the same weights."""

    def __init__(self, preset: str, setting: Setting) -> None:
        self.device, dtype = setting.device, setting.training_dtype or setting.dtype
        self.config, self.training = model_config(preset), training_config(preset, dtype)
        self.autocast = None if dtype == torch.float32 else dtype
        torch.manual_seed(setting.seed)
        self.weights = TorchTransformer(self.config).state_dict()

    def model(self, kind: type[Model]) -> Model:
        return loaded(kind, self.config, self.weights, self.device)

    def ours(self, **options: bool) -> "OurStep":
        return OurStep(self.model(Transformer), self.training, self.device, self.autocast, **options)

    def theirs(self, **options: bool) -> Step:
        return Step(self.model(TorchTransformer), torch_nn.loss, self.training, self.autocast, **options)

    def steps(self) -> dict[str, Any]:
        return {peers.OURS: self.ours(), PACKED: self.ours(packed=True), peers.TORCH_NN: self.theirs()}

    def loss(self, model: nn.Module, loss: Loss) -> "Checked":
        """Loss of a model in eval mode, for the check."""
        return Checked(model.eval(), partial(loss, label_smoothing=self.training.label_smoothing), self.autocast)

    def losses(self) -> dict[str, "Checked"]:
        """Losses by provider, for the check of steps()."""
        return {
            peers.OURS: self.loss(self.model(Transformer), our_loss),
            PACKED: self.loss(self.model(Transformer), partial(our_loss, packed=True)),
            peers.TORCH_NN: self.loss(self.model(TorchTransformer), torch_nn.loss),
        }

    def exact_loss(self) -> "Checked":
        """The reference of losses(), in float64."""
        return replace(self.loss(self.model(TorchTransformer).double(), torch_nn.loss), autocast=None)


@dataclass(frozen=True)
class Checked:
    """Loss per target token, without dropout and without an update."""

    model: nn.Module
    loss: Loss
    autocast: torch.dtype | None

    def __call__(self, batch: Batch) -> Tensor:
        with torch.autocast(batch.source.device.type, self.autocast, enabled=self.autocast is not None):
            return self.loss(self.model, batch) / batch.target_tokens

    def with_gradient(self, batch: Batch) -> list[Tensor]:
        """[loss of the batch's head(), norm of its gradient over all parameters]."""
        value = self(head(batch))
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norms = [g.double().norm() for g in torch.autograd.grad(value, parameters)]
        return [value.detach().double(), torch.stack(norms).norm()]


def _case(setting: Setting, preset: str, rows: int, width: int, padding: float) -> Case:
    config = model_config(preset)
    tokens = round(rows * width * (1.0 - padding))

    def inputs(i: int) -> tuple[Batch]:
        batch = synthetic.batch(rows, width, padding, config.vocab_size, seed=1_000 * setting.seed + i)
        return (batch.to(setting.device),)

    def make() -> Work:
        contenders, device = Contenders(preset, setting), setting.device
        compiled = Absent("left out of --quick: it compiles for minutes; run without --quick")
        providers = contenders.steps()
        providers[peers.COMPILE] = contenders.theirs(compiled=True) if setting.at_least("standard") else compiled
        checked: dict[str, Any] = {name: loss.with_gradient for name, loss in contenders.losses().items()}
        checked[peers.COMPILE] = checked[peers.TORCH_NN]  # the same module; torch.compile itself is not checked
        if setting.on_gpu:
            providers[peers.CUDA_GRAPH] = Graphed(contenders.ours(captured=True), device)
            checked[peers.CUDA_GRAPH] = checked[peers.OURS]  # tests/gpu/test_graphs.py checks replays
            providers[peers.TORCH_GRAPH] = Graphed(contenders.theirs(captured=True), device)
            checked[peers.TORCH_GRAPH] = checked[peers.TORCH_NN]
        if not config.norm_first:

            def step() -> Provider:
                marian = huggingface.marian(config, contenders.weights, dropout=config.dropout).to(device)
                return Step(marian, huggingface.loss, contenders.training, contenders.autocast)

            def loss() -> Provider:
                marian = huggingface.marian(config, contenders.weights).to(device)
                return contenders.loss(marian, huggingface.loss).with_gradient

            providers[peers.HUGGING_FACE] = peers.provider(peers.HUGGING_FACE, device, step)
            checked[peers.HUGGING_FACE] = peers.provider(peers.HUGGING_FACE, device, loss)
        return Work(
            inputs=inputs,
            providers=providers,
            without_dropout=checked,
            trained={name: step.model for name, step in providers.items() if hasattr(step, "model")},
            reference=contenders.exact_loss().with_gradient,
            plain=peers.TORCH_NN,
            unit="target tokens/s",
            units=lambda batch: float(batch.target_tokens),
            rounds=5 if preset.startswith("paper") and not setting.on_gpu else None,  # seconds each
        )

    return Case(
        group="training_step",
        name=preset,
        shape={"rows": rows, "width": width, "padding": padding, "vocabulary": config.vocab_size},
        dtype=setting.training_dtype_name,
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
    """fasttfm's training step, as in its Trainer."""

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
        """Loss per target token before the step, 0-d without gradient; divisor: see torch_nn.Step."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = our_loss(self.model, batch, self.label_smoothing, packed=self.packed)
            loss = loss / (batch.target_tokens if divisor is None else divisor)
        self.optimization.backward(loss)
        self.optimization.step(self._lr)
        return loss.detach()


class Graphed:
    """A step captured in one CUDA graph per shape, as in fasttfm train."""

    def __init__(self, step: OurStep | Step, device: torch.device) -> None:
        self.model = step.model
        self._step, self._graphs = step, Graphs(device, "a step", "leave it out")
        self._tokens, self._loss = torch.zeros(2, device=device)

    def __call__(self, batch: Batch) -> Tensor:
        self._tokens.fill_(batch.target_tokens)
        run_on_batch(self._graphs, self._run, batch)
        return self._loss.clone()

    def held_bytes(self) -> int:
        """Size of the graphs' memory pool."""
        return self._graphs.held_bytes()

    def _run(self, batch: Batch) -> None:
        self._loss.copy_(self._step(batch, divisor=self._tokens))


def our_loss(model: Transformer, batch: Batch, label_smoothing: float, *, packed: bool = False) -> Tensor:
    return model.batch_loss(batch, label_smoothing=label_smoothing, packed=packed)[0]


def head(batch: Batch) -> Batch:
    """The first rows, up to _CHECKED cells per side: float64 logits of a whole batch would fill a GPU."""
    rows = max(1, _CHECKED // max(batch.source.shape[1], batch.target_in.shape[1]))
    names = ("source", "source_lengths", "target_in", "target_out", "target_lengths")
    fields: dict[str, Any] = {name: getattr(batch, name)[:rows] for name in names}
    counts: dict[str, Any] = {f"{side}_tokens": int(fields[f"{side}_lengths"].sum()) for side in ("source", "target")}
    return Batch(**fields, **counts)
