"""Forward and backward of one layer, planned once per input signature.

Sub-layers call the plans of their operators; gradients flow back through the same plans in reverse. The norm behind a
sub-layer also adds the bias of the preceding product where a kernel computes it, and in the backward pass the two
gradients of its output.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnF

from fasttfm import functional as F
from fasttfm.functional import backends
from fasttfm.functional.attention.arguments import checked_sequences
from fasttfm.functional.attention.call import Sequences
from fasttfm.functional.attention.operator import OPERATOR as ATTENTION
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.dropout import LEAST_P
from fasttfm.functional.feed_forward import OPERATOR as FEED_FORWARD
from fasttfm.functional.operator import Inner
from fasttfm.functional.record import layout_of
from fasttfm.functional.residual_add import OPERATOR as RESIDUAL_ADD
from fasttfm.functional.residual_norm import OPERATOR as RESIDUAL_NORM
from fasttfm.models.attention import Lengths, Projected, attend, projected
from fasttfm.models.packing import Packing
from fasttfm.models.plain import attentions_of, fused_activation
from fasttfm.models.residual import OUTPUT_SITES, WEIGHT_SITES, LayerSeed, Site, probability

PER_SUBLAYER = 6
"""Parameters per sub-layer, each may be None: weight and bias of its first product, its last product and the norm
behind it."""


class Settings(NamedTuple):
    """Everything that a layer depends on besides tensors."""

    norm_first: bool
    activation: str
    heads: tuple[int, ...]
    """Of self-attention, then cross-attention in a decoder."""
    causal: tuple[bool, ...]
    dropout_p: tuple[float, ...]
    """In the order of Layer.dropouts()."""
    eps: tuple[float | None, ...]
    """Of the norm behind each sub-layer; None: there is none."""
    is_last: bool
    """Pre-norm: the residual stream behind the layer is not used."""
    batch_first: bool = True


class Batch(NamedTuple):
    """Inputs that all layers of a stack share."""

    seed: Tensor | None
    lengths: Lengths
    memory: Tensor | None
    memory_lengths: Lengths
    masks: tuple[Tensor | None, Tensor | None] = (None, None)
    """Of self-attention and cross-attention, in the form F.attention() takes."""


def settings_of(layer: Any, norms: list[Any], *, is_last: bool) -> Settings:
    """Settings of a layer; norms: the norm behind each sub-layer."""
    attentions = attentions_of(layer)
    return Settings(
        layer.norm_first, fused_activation(layer.activation) or "", tuple([each.num_heads for each in attentions]),
        (layer.causal, False), tuple(map(probability, layer.dropouts())),
        tuple([None if norm is None else norm.eps for norm in norms]), is_last, attentions[0].batch_first,
    )  # fmt: skip


def parameters_of(layer: Any, norms: list[Any]) -> list[Any]:
    """Parameters of a layer in the order of its plan, PER_SUBLAYER each; norms: the norm behind each sub-layer."""
    products = [(a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias) for a in attentions_of(layer)]
    products.append((layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias))
    affine = [(None, None) if norm is None else (norm.weight, norm.bias) for norm in norms]
    return [*chain.from_iterable((*each, *norm) for each, norm in zip(products, affine, strict=True))]


class Stash:
    """Stack of saved tensors: the forward pass pushes, the backward pass pops."""

    def __init__(self, tensors: Sequence[Tensor | None] = (), records: Sequence[tuple] = ()) -> None:
        self.tensors, self.records = list(tensors), list(records)

    def push(self, *tensors: Tensor | None) -> None:
        self.tensors += tensors

    def pop(self) -> Any:
        return self.tensors.pop()

    def push_record(self, saved: Any) -> None:
        """Push the record that an operator saved."""
        layout = layout_of(saved.__class__)
        self.records.append((layout, layout.others(saved)))
        self.tensors += layout.tensors(saved)

    def pop_record(self) -> Any:
        layout, others = self.records.pop()
        count = layout.count
        tensors = self.tensors[-count:]
        del self.tensors[-count:]
        return layout.merge(tensors, others)


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


class _Attention:
    """Self-attention or cross-attention, with its input and output projections."""

    def __init__(self, settings: Settings, *, cross: bool, sums_biases: bool) -> None:
        """sums_biases: whether a kernel computes the gradients of the biases."""
        self._operator, self._sums_biases = Inner(ATTENTION), sums_biases
        self._heads, self._causal, self._p = settings.heads[cross], settings.causal[cross], settings.dropout_p[cross]
        self._cross, self._batch_first, self._site = cross, settings.batch_first, WEIGHT_SITES[cross]

    def forward(
        self, y: Tensor, weights: Sequence[Any], seed: LayerSeed, batch: Batch, route: str, stash: Stash | None,
        keys_values: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The output (B, L, d) for y (B, L, d); weights: weight and bias of the first and the last product.

        keys_values (B, S, 2 d): those of the memory, if one product computed them for all layers.
        """
        weight, bias, last_weight, last_bias = weights
        width, mask = y.shape[-1], batch.masks[self._cross]
        size = width // self._heads
        key, lengths, keys = None, batch.lengths, batch.lengths
        if not self._cross:
            query = nnF.linear(y, weight, bias).view(*y.shape[:-1], 3, self._heads, size)
        else:
            memory, keys = batch.memory, batch.memory_lengths
            assert memory is not None
            query_bias, key_bias = (None, None) if bias is None else (bias[:width], bias[width:])
            query = nnF.linear(y, weight[:width], query_bias).view(*y.shape[:-1], self._heads, size)
            key = nnF.linear(memory, weight[width:], key_bias) if keys_values is None else keys_values
            key = key.view(*memory.shape[:-1], 2, self._heads, size)
        starts: Any = (None, None)
        longest, key_lengths, covered = (0, 0), keys, False
        if isinstance(keys, Packing):
            query, key = query[0], None if key is None else key[0]
            starts, longest, key_lengths = (lengths.starts, keys.starts), (lengths.longest, keys.longest), None  # type: ignore[union-attr]
            if keys.starts.is_cpu or backends.checks_on_gpu:  # values, not part of a signature
                checked_sequences(query, key, None, Sequences(starts[0], starts[1], longest[0], longest[1]))
            covered = len(query) == lengths.tokens and (key is None or len(key) == keys.tokens)  # type: ignore[union-attr]
        elif not self._batch_first:
            query, key = query.transpose(0, 1), None if key is None else key.transpose(0, 1)
        outputs, saved = self._operator(
            query, key, None, key_lengths, *starts, mask, None, None, None, seed.seed if self._p else None, *longest,
            self._causal, 0, -1, 0.0, 0, self._p, size**-0.5, seed.first_site + self._site, covered, False, route,
        )  # fmt: skip
        joined = outputs[0] if self._batch_first or isinstance(keys, Packing) else outputs[0].transpose(0, 1)
        joined = joined.contiguous().view(y.shape)
        if stash is not None:
            stash.push(y, joined)
            stash.push_record(saved)
        return nnF.linear(joined, last_weight, last_bias)

    def backward(
        self, dout: Tensor, weights: Sequence[Any], needs_grad: Sequence[bool], stash: Stash, memory: Tensor | None,
        d_keys_values: Tensor | None = None, accumulator: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, list[Any]]:  # fmt: skip
        """Gradients of y, the memory and the parameters; a pair holds the rows of a parameter: queries, then the rest.

        accumulator: the gradient of y is added to it in place. d_keys_values (B, S, 2 d): output buffer, from which one
        product computes the gradient of the memory for all layers; it is None here.
        """
        saved = stash.pop_record()
        joined, y = _rows(stash.pop()), stash.pop()
        weight, bias, last_weight, last_bias = weights
        rows, inputs, width = _rows(dout), _rows(y), y.shape[-1]
        d_last_weight = torch.mm(rows.t(), joined) if needs_grad[2] else None
        d_last_bias = rows.sum(0) if needs_grad[3] and last_bias is not None else None
        d_joined = torch.mm(rows, last_weight)
        if not saved.call.packed:
            d_joined = d_joined.view(y.shape) if self._batch_first else d_joined.view(y.shape).transpose(0, 1)
        bias_dtype = bias.dtype if bias is not None and self._sums_biases and saved.call.mask is None else None
        out = None if d_keys_values is None else self._as_key(d_keys_values, saved)
        d_query, d_key, _, *d_biases = self._operator.backward(d_joined, False, bias_dtype, out, saved)[:5]
        d_query = self._as_rows(d_query, saved)
        d_key = None if d_key is None or out is not None else self._as_rows(d_key, saved)
        if bias is not None and d_biases[0] is None and needs_grad[1]:
            sum_dtype = torch.float32 if bias_dtype is not None else None
            d_biases = [None if x is None else x.sum(0, dtype=sum_dtype) for x in (d_query, d_key)]
        d_bias = tuple(d_biases) if self._cross and d_biases[0] is not None else d_biases[0]
        d_weight = None
        if d_key is None:
            d_weight = torch.mm(d_query.t(), inputs) if needs_grad[0] else None
            weight = weight[:width] if self._cross else weight
            dy = torch.mm(d_query, weight) if accumulator is None else _rows(accumulator).addmm_(d_query, weight)
            return dy.view(y.shape), None, [d_weight, d_bias, d_last_weight, d_last_bias]
        assert memory is not None
        if needs_grad[0]:
            d_weight = weight.new_empty(weight.shape)
            torch.mm(d_query.t(), inputs, out=d_weight[:width])
            torch.mm(d_key.t(), _rows(memory), out=d_weight[width:])
        dy = torch.mm(d_query, weight[:width]).view(y.shape)
        d_memory = torch.mm(d_key, weight[width:]).view(memory.shape)
        return dy, d_memory, [d_weight, d_bias, d_last_weight, d_last_bias]

    def _as_rows(self, gradient: Tensor, saved: Any) -> Tensor:
        """The gradient of a projection in the layout (M, N) of its product."""
        gradient = gradient if self._batch_first or saved.call.packed else gradient.transpose(0, 1)
        return gradient.contiguous().flatten(0, 0 if saved.call.packed else 1).flatten(1)

    def _as_key(self, gradient: Tensor, saved: Any) -> Tensor:
        """The gradient (B, S, 2 d) of keys and values in the operator's layout."""
        gradient = gradient.view(*gradient.shape[:-1], 2, self._heads, -1)
        if saved.call.packed:
            return gradient[0]
        return gradient if self._batch_first else gradient.transpose(0, 1)

    def by_operators(self, y: Tensor, weights: Sequence[Any], seed: LayerSeed, batch: Batch) -> Tensor:
        """forward() in differentiable operators."""
        memory, keys = (batch.memory, batch.memory_lengths) if self._cross else (None, batch.lengths)
        heads = projected(y, memory, weights[0], weights[1], self._heads)
        transposed = not (self._batch_first or isinstance(keys, Packing))
        if transposed:
            heads = Projected(*(None if x is None else x.transpose(0, 1) for x in heads))  # type: ignore[arg-type]
        mask, dropout = batch.masks[self._cross], seed.dropout(self._site, self._p)
        joined = attend(heads, batch.lengths, keys, mask=mask, causal=self._causal, dropout=dropout)
        return nnF.linear(joined.transpose(0, 1) if transposed else joined, *weights[2:])


class _FeedForward:
    """The feed-forward network, with the methods of _Attention."""

    def __init__(self, settings: Settings) -> None:
        self._operator = Inner(FEED_FORWARD)
        self._activation, self._p = settings.activation, settings.dropout_p[len(settings.heads)]

    def forward(
        self, y: Tensor, weights: Sequence[Any], seed: LayerSeed, batch: Batch, route: str, stash: Stash | None,
        *_: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The output (B, L, d) for y (B, L, d)."""
        drawn = seed.seed if self._p else None
        site = seed.first_site + Site.HIDDEN
        outputs, saved = self._operator(y, *weights, self._p, drawn, site, self._activation, route)
        if stash is not None:
            stash.push_record(saved)
        return outputs[0]

    def backward(
        self, dout: Tensor, weights: Sequence[Any], needs_grad: Sequence[bool], stash: Stash, *_: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list[Any]]:
        """Gradients of y, of the memory (None) and of the parameters."""
        dy, d_weight1, d_bias1, d_weight2, d_bias2 = self._operator.backward(dout, stash.pop_record())
        return dy, None, [d_weight1, d_bias1, d_weight2, d_bias2]

    def by_operators(self, y: Tensor, weights: Sequence[Any], seed: LayerSeed, batch: Batch) -> Tensor:
        """forward() in differentiable operators."""
        dropout = seed.dropout(Site.HIDDEN, self._p)
        return F.feed_forward(y, *weights, activation=self._activation, **dropout.options())


class _Norm:
    """s = x + dropout(output), and y = norm(s); without a norm, y is s."""

    def __init__(self, eps: float | None, dropout_p: float, site: int) -> None:
        self._operator = Inner(RESIDUAL_ADD if eps is None else RESIDUAL_NORM)
        self.eps, self.p, self.site = eps, dropout_p, site

    def forward(
        self, output: Tensor, bias: Tensor | None, x: Tensor, parameters: Sequence[Any], seed: LayerSeed, route: str,
        stash: Stash | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y and s; bias: added to the output, or None."""
        drawn, site = seed.seed if self.p else None, seed.first_site + self.site
        if self.eps is None:
            outputs, saved = self._operator(output, x, self.p, drawn, site, route)
        else:
            outputs, saved = self._operator(output, bias, x, *parameters, drawn, self.eps, self.p, site, False, route)
        if stash is not None:
            stash.push_record(saved)
        return outputs[0], outputs[0 if self.eps is None else 1]

    def backward(
        self, dy: Tensor | None, dy2: Tensor | None, ds: Tensor | None, stash: Stash
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
        """Gradients of output, x, bias and the norm's parameters; dy and dy2 are added."""
        saved = stash.pop_record()
        if self.eps is None:
            return self._operator.backward(dy, saved), dy, None, [None, None]  # type: ignore[return-value]
        dx, d_residual, d_bias, d_weight, d_norm_bias = self._operator.backward(dy, dy2, ds, saved)
        return d_residual if dx is None else dx, d_residual, d_bias, [d_weight, d_norm_bias]


class LayerPlan:
    """Forward and backward of a layer for inputs of one signature."""

    def __init__(
        self, settings: Settings, x: Tensor, dtype: torch.dtype, parameter_dtype: torch.dtype, *, seeded: bool
    ) -> None:
        """x: the layer's input; dtype: of its products; parameter_dtype: of parameters and their gradients; seeded:
        whether calls have a seed, without which nothing is dropped."""
        p = tuple([p if seeded and p > LEAST_P else 0.0 for p in settings.dropout_p])
        self.settings = settings = settings._replace(dropout_p=p)
        self.dtype, self.copies = dtype, dtype is not parameter_dtype
        self.route = backends.current
        self.returns_stream = settings.norm_first and not settings.is_last
        self.has_kernels = has_kernels = kernel_route(self.route, x) == "triton"
        """Whether norm kernels add the biases of last products, and kernels sum the gradients of all biases."""
        self.merged_sums: Callable[[], Any] = contextlib.nullcontext
        """Context for the backward pass of several layers: one launch reduces the partial sums of their biases and
        norms."""
        if has_kernels:
            from fasttfm.kernels.partial_sums import one_launch

            self.merged_sums = partial(one_launch, {}, parameter_dtype)
        count = len(settings.heads)
        sublayers: list[Any] = [_Attention(settings, cross=bool(n), sums_biases=has_kernels) for n in range(count)]
        sublayers.append(_FeedForward(settings))
        norms = map(_Norm, settings.eps, p[count + 1 :], (*OUTPUT_SITES[:count], Site.FEED_FORWARD))
        self.sublayers = [*zip(sublayers, norms, [has_kernels and eps is not None for eps in settings.eps])]
        """(sub-layer, norm behind it, whether that norm adds the bias of the last product)."""
        self.size, self.products = PER_SUBLAYER * len(sublayers), 4 * len(sublayers)
        """Numbers of parameters: all, and those of products."""

    def forward(
        self, y: Tensor, x: Tensor, parameters: Sequence[Any], weights: Sequence[Any], seed: LayerSeed, batch: Batch,
        stash: Stash | None, keys_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y and x behind the layer. Post-norm they are the same tensor; pre-norm y is the norm of x, if one follows.

        weights: parameters of the products in their dtype, four per sub-layer; keys_values: as in _Attention.
        """
        norm_first, dtype = self.settings.norm_first, self.dtype
        for number, (sublayer, norm, adds_bias) in enumerate(self.sublayers):
            *first, last_bias = weights[4 * number : 4 * number + 4]
            _, _, _, bias, *affine = parameters[PER_SUBLAYER * number : PER_SUBLAYER * (number + 1)]
            output = sublayer.forward(
                y if y.dtype is dtype else y.to(dtype), (*first, None if adds_bias else last_bias), seed, batch,
                self.route, stash, keys_values,
            )  # fmt: skip
            y, s = norm.forward(output, bias if adds_bias else None, x, affine, seed, self.route, stash)
            x = s if norm_first else y
        return y, x

    def backward(
        self, dy: Tensor, ds: Tensor | None, weights: Sequence[Any], needs_grad: Sequence[bool], stash: Stash,
        memory: Tensor | None, d_keys_values: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[Any]]:  # fmt: skip
        """Gradients of the layer's inputs y and x, the memory and the parameters.

        That of x is None if already added to that of y. Pairs of gradients and d_keys_values: as in _Attention.
        """
        norm_first = self.settings.norm_first
        gradients: list[Any] = []
        d_memory: Tensor | None = None
        dy2: Tensor | None = None
        d_x: Any = None
        for number in range(len(self.sublayers) - 1, -1, -1):
            sublayer, norm, adds_bias = self.sublayers[number]
            d_output, d_x, d_bias, d_affine = norm.backward(dy, dy2, ds, stash)
            *first, last_bias = weights[4 * number : 4 * number + 4]
            accumulator = None
            if adds_bias and not number and not norm_first and d_x.dtype is d_output.dtype:
                accumulator, d_x = d_x, None  # the product adds both gradients of the input
            dy, d_memory_part, d_products = sublayer.backward(
                d_output, (*first, None if adds_bias else last_bias), needs_grad[PER_SUBLAYER * number :], stash,
                memory, d_keys_values, accumulator,
            )  # fmt: skip
            if adds_bias:
                d_products[3] = d_bias
            d_memory = d_memory_part if d_memory is None else d_memory
            gradients = [*d_products, *d_affine, *gradients]
            dy2, ds = (None, d_x) if norm_first else (d_x, None)
        return dy, d_x, d_memory, gradients

    def by_operators(
        self, y: Tensor, x: Tensor, parameters: Sequence[Any], seed: LayerSeed, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """forward() in operators that autograd differentiates, any number of times."""
        for number, (sublayer, norm, _) in enumerate(self.sublayers):
            *products, weight, bias = parameters[PER_SUBLAYER * number : PER_SUBLAYER * (number + 1)]
            weights = [p if p is None else p.to(self.dtype) for p in products]
            output = sublayer.by_operators(y.to(self.dtype), weights, seed, batch)
            dropout = seed.dropout(norm.site, norm.p).options()
            if norm.eps is None:
                y = s = F.residual_add(output, x, **dropout)
            else:
                y, s = F.residual_layer_norm(output, x, weight, bias, norm.eps, **dropout)
            x = s if self.settings.norm_first else y
        return y, x
