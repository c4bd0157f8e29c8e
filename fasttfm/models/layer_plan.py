"""A layer's forward and backward pass: operators and products, planned once for batches of a signature.

Sub-layers call the plans of their operators, and the gradients flow back through them in the opposite order. The norm
behind each sub-layer also adds the bias of the product before it, where a kernel takes it, and in the backward pass the
two gradients of its output.
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
from fasttfm.functional.attention.call import Sequences
from fasttfm.functional.attention.checks import checked_sequences
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
"""Parameters of a sub-layer, None among them: weight and bias of its first product and of its last, and of the norm
behind it."""
_has_memory = torch._C._has_storage  # not of many gradients at once, as torch.vmap and is_grads_batched hand them on


class Settings(NamedTuple):
    """All that a layer computes by besides tensors."""

    norm_first: bool
    activation: str
    heads: tuple[int, ...]
    """Of self-attention, and of a decoder's attention over the memory."""
    causal: tuple[bool, ...]
    dropout_p: tuple[float, ...]
    """As Layer.dropouts() lists them: of each attention's weights, inside the network, of each sub-layer's output."""
    eps: tuple[float | None, ...]
    """Of the norm behind each sub-layer; None where none is behind it."""
    is_last: bool
    """Pre-norm: nobody reads the residual stream behind the layer."""
    batch_first: bool = True
    """False: rows are (L, B, d)."""


class Batch(NamedTuple):
    """Inputs of all layers of a stack, besides the residual stream."""

    seed: Tensor | None
    lengths: Lengths
    memory: Tensor | None
    memory_lengths: Lengths
    masks: tuple[Tensor | None, Tensor | None] = (None, None)
    """Of self-attention and of attention over the memory, as F.attention() takes them."""


def settings_of(layer: Any, norms: list[Any], *, is_last: bool) -> Settings:
    """Settings of a layer and of the norms behind its sub-layers."""
    attentions = attentions_of(layer)
    return Settings(
        layer.norm_first, fused_activation(layer.activation) or "", tuple([each.num_heads for each in attentions]),
        (layer.causal, False), tuple(map(probability, layer.dropouts())),
        tuple([None if norm is None else norm.eps for norm in norms]), is_last, attentions[0].batch_first,
    )  # fmt: skip


def parameters_of(layer: Any, norms: list[Any]) -> list[Any]:
    """A layer's parameters, and those of the norms behind its sub-layers, in the order that its plan takes them."""
    products = [(a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias) for a in attentions_of(layer)]
    products.append((layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias))
    of_norms = [(None, None) if norm is None else (norm.weight, norm.bias) for norm in norms]
    return [*chain.from_iterable((*each, *norm) for each, norm in zip(products, of_norms, strict=True))]


class Stash:
    """Tensors that a forward pass keeps, which its backward pass takes from the end."""

    def __init__(self, tensors: Sequence[Tensor | None] = (), records: Sequence[tuple] = ()) -> None:
        self.tensors, self.records = list(tensors), list(records)

    def push(self, *tensors: Tensor | None) -> None:
        self.tensors += tensors

    def pop(self) -> Any:
        return self.tensors.pop()

    def push_record(self, saved: Any) -> None:
        """Keep what an operator saves."""
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
    """Self-attention, or attention over a memory, and its output projection."""

    def __init__(self, settings: Settings, *, over_memory: bool, sums: bool) -> None:
        """sums: whether a kernel sums the gradients of the biases."""
        self._operator, self._sums = Inner(ATTENTION), sums
        self._heads, self._causal = settings.heads[over_memory], settings.causal[over_memory]
        self._p = settings.dropout_p[over_memory]
        self._over_memory, self._batch_first = over_memory, settings.batch_first
        self._site = WEIGHT_SITES[over_memory]

    def forward(
        self, y: Tensor, weights: Sequence[Any], seed: LayerSeed, batch: Batch, route: str, stash: Stash | None,
        keys_values: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """y (B, L, d) to the same, by the weights and biases of both products.

        keys_values (B, S, 2 d): of the memory, where one product of all layers computed them.
        """
        weight, bias, last_weight, last_bias = weights
        width, mask = y.shape[-1], batch.masks[self._over_memory]
        size = width // self._heads
        key, lengths, keys = None, batch.lengths, batch.lengths
        if not self._over_memory:
            query = nnF.linear(y, weight, bias).view(*y.shape[:-1], 3, self._heads, size)
        else:
            memory, keys = batch.memory, batch.memory_lengths
            assert memory is not None
            of_query, of_key = (None, None) if bias is None else (bias[:width], bias[width:])
            query = nnF.linear(y, weight[:width], of_query).view(*y.shape[:-1], self._heads, size)
            key = nnF.linear(memory, weight[width:], of_key) if keys_values is None else keys_values
            key = key.view(*memory.shape[:-1], 2, self._heads, size)
        starts: Any = (None, None)
        longest, key_lengths, covered = (0, 0), keys, False
        if isinstance(keys, Packing):
            query, key = query[0], None if key is None else key[0]
            starts, longest, key_lengths = (lengths.starts, keys.starts), (lengths.longest, keys.longest), None  # type: ignore[union-attr]
            if keys.starts.is_cpu or backends.checks_on_gpu:  # numbers in it, which no signature tells
                checked_sequences(query, key, None, Sequences(starts[0], starts[1], longest[0], longest[1]))
            covered = len(query) == lengths.tokens and (key is None or len(key) == keys.tokens)  # type: ignore[union-attr]
        elif not self._batch_first:
            query, key = query.transpose(0, 1), None if key is None else key.transpose(0, 1)
        p, drawn = (0.0, None) if seed.seed is None or self._p <= LEAST_P else (self._p, seed.seed)
        outputs, saved = self._operator(
            query, key, None, key_lengths, *starts, mask, None, None, None, drawn, *longest, self._causal, 0, -1,
            0.0, 0, p, size**-0.5, seed.first_site + self._site, covered, False, route,
        )  # fmt: skip
        joined = outputs[0] if self._batch_first or isinstance(keys, Packing) else outputs[0].transpose(0, 1)
        joined = joined.contiguous().view(y.shape)
        if stash is not None:
            stash.push(y, joined)
            stash.push_record(saved)
        return nnF.linear(joined, last_weight, last_bias)

    def backward(
        self, dout: Tensor, weights: Sequence[Any], wanted: Sequence[bool], stash: Stash, memory: Tensor | None,
        d_keys_values: Tensor | None = None, onto: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, list[Any]]:  # fmt: skip
        """Gradients of y, added in place to onto, of the memory and of the parameters; a pair stands for the rows of
        one, first those that project the queries.

        d_keys_values (B, S, 2 d): written, where one product of all layers follows; what that gives is None here.
        """
        saved = stash.pop_record()
        joined, y = _rows(stash.pop()), stash.pop()
        weight, bias, last_weight, last_bias = weights
        rows, inputs, width = _rows(dout), _rows(y), y.shape[-1]
        d_last_weight = torch.mm(rows.t(), joined) if wanted[2] else None
        d_last_bias = rows.sum(0) if wanted[3] and last_bias is not None else None
        d_joined = torch.mm(rows, last_weight)
        if not saved.call.packed:
            d_joined = d_joined.view(y.shape) if self._batch_first else d_joined.view(y.shape).transpose(0, 1)
        bias_dtype = bias.dtype if bias is not None and self._sums and saved.call.mask is None else None
        into = None if d_keys_values is None else self._as_key(d_keys_values, saved)
        d_query, d_key, _, *d_biases = self._operator.backward(d_joined, False, bias_dtype, into, saved)[:5]
        d_query = self._as_rows(d_query, saved)
        d_key = None if d_key is None or into is not None else self._as_rows(d_key, saved)
        if bias is not None and d_biases[0] is None and wanted[1]:
            precise = torch.float32 if bias_dtype is not None else None
            d_biases = [None if x is None else x.sum(0, dtype=precise) for x in (d_query, d_key)]
        d_bias = tuple(d_biases) if self._over_memory and d_biases[0] is not None else d_biases[0]
        d_weight = None
        if d_key is None:
            d_weight = torch.mm(d_query.t(), inputs) if wanted[0] else None
            weight = weight[:width] if self._over_memory else weight
            dy = torch.mm(d_query, weight) if onto is None else _rows(onto).addmm_(d_query, weight)
            return dy.view(y.shape), None, [d_weight, d_bias, d_last_weight, d_last_bias]
        assert memory is not None
        if wanted[0]:
            d_weight = weight.new_empty(weight.shape)
            torch.mm(d_query.t(), inputs, out=d_weight[:width])
            torch.mm(d_key.t(), _rows(memory), out=d_weight[width:])
        dy = torch.mm(d_query, weight[:width]).view(y.shape)
        d_memory = torch.mm(d_key, weight[width:]).view(memory.shape)
        return dy, d_memory, [d_weight, d_bias, d_last_weight, d_last_bias]

    def _as_rows(self, gradient: Tensor, saved: Any) -> Tensor:
        """The gradient of a projection as the product wrote it, (M, N)."""
        gradient = gradient if self._batch_first or saved.call.packed else gradient.transpose(0, 1)
        return gradient.contiguous().flatten(0, 0 if saved.call.packed else 1).flatten(1)

    def _as_key(self, gradient: Tensor, saved: Any) -> Tensor:
        """The gradient (B, S, 2 d) of keys and values as the operator was given them."""
        gradient = gradient.view(*gradient.shape[:-1], 2, self._heads, -1)
        if saved.call.packed:
            return gradient[0]
        return gradient if self._batch_first else gradient.transpose(0, 1)

    def by_operators(self, y: Tensor, weights: Sequence[Any], seed: LayerSeed, batch: Batch) -> Tensor:
        """forward() in operators that autograd differentiates."""
        memory, keys = (batch.memory, batch.memory_lengths) if self._over_memory else (None, batch.lengths)
        heads = projected(y, memory, weights[0], weights[1], self._heads)
        turned = not (self._batch_first or isinstance(keys, Packing))
        if turned:
            heads = Projected(*(None if x is None else x.transpose(0, 1) for x in heads))  # type: ignore[arg-type]
        mask, dropout = batch.masks[self._over_memory], seed.dropout(self._site, self._p)
        joined = attend(heads, batch.lengths, keys, mask=mask, causal=self._causal, dropout=dropout)
        return nnF.linear(joined.transpose(0, 1) if turned else joined, *weights[2:])


class _FeedForward:
    """The feed-forward network."""

    def __init__(self, settings: Settings) -> None:
        self._operator = Inner(FEED_FORWARD)
        self._activation, self._p = settings.activation, settings.dropout_p[len(settings.heads)]

    def forward(
        self, y: Tensor, weights: Sequence[Any], seed: LayerSeed, batch: Batch, route: str, stash: Stash | None,
        *_: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """y (B, L, d) to the same, by the weights and biases of both products."""
        p, drawn = (0.0, None) if seed.seed is None or self._p <= LEAST_P else (self._p, seed.seed)
        outputs, saved = self._operator(y, *weights, p, drawn, seed.first_site + Site.HIDDEN, self._activation, route)
        if stash is not None:
            stash.push_record(saved)
        return outputs[0]

    def backward(
        self, dout: Tensor, weights: Sequence[Any], wanted: Sequence[bool], stash: Stash, *_: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list[Any]]:
        """Gradients of y and of the parameters, as those of attention."""
        dy, d_weight1, d_bias1, d_weight2, d_bias2 = self._operator.backward(dout, stash.pop_record())
        return dy, None, [d_weight1, d_bias1, d_weight2, d_bias2]

    def by_operators(self, y: Tensor, weights: Sequence[Any], seed: LayerSeed, batch: Batch) -> Tensor:
        """forward() in operators that autograd differentiates."""
        dropout = seed.dropout(Site.HIDDEN, self._p)
        return F.feed_forward(y, *weights, activation=self._activation, **dropout.options())


class _Norm:
    """x + dropout(output), and the norm that reads it."""

    def __init__(self, eps: float | None, dropout_p: float, site: int) -> None:
        self._operator = Inner(RESIDUAL_ADD if eps is None else RESIDUAL_NORM)
        self.eps, self.p, self.site = eps, dropout_p, site

    def forward(
        self, output: Tensor, bias: Tensor | None, x: Tensor, parameters: Sequence[Any], seed: LayerSeed, route: str,
        stash: Stash | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y and s, which is y where no norm is behind."""
        p, drawn = (0.0, None) if seed.seed is None or self.p <= LEAST_P else (self.p, seed.seed)
        site = seed.first_site + self.site
        if self.eps is None:
            outputs, saved = self._operator(output, x, p, drawn, site, route)
        else:
            outputs, saved = self._operator(output, bias, x, *parameters, drawn, self.eps, p, site, False, route)
        if stash is not None:
            stash.push_record(saved)
        return outputs[0], outputs[0 if self.eps is None else 1]

    def backward(
        self, dy: Tensor | None, dy2: Tensor | None, ds: Tensor | None, stash: Stash
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
        """Gradients of the output, of x, of the bias and of the norm's parameters."""
        saved = stash.pop_record()
        if self.eps is None:
            return self._operator.backward(dy, saved), dy, None, [None, None]  # type: ignore[return-value]
        dx, d_residual, d_bias, d_weight, d_norm_bias = self._operator.backward(dy, dy2, ds, saved)
        return d_residual if dx is None else dx, d_residual, d_bias, [d_weight, d_norm_bias]


class LayerPlan:
    """A layer's forward and backward pass for batches of one signature."""

    def __init__(self, settings: Settings, x: Tensor, dtype: torch.dtype, of_parameters: torch.dtype) -> None:
        """x: the layer's input; dtype: of its products; of_parameters: theirs, and that of their gradients."""
        self.settings, self.dtype, self.copies = settings, dtype, dtype is not of_parameters
        self.route = backends.current
        self.hands_on = settings.norm_first and not settings.is_last
        self.adds = adds = kernel_route(self.route, x) == "triton"
        """Whether kernels add the biases of last products, and sum the gradients of all."""
        self.one_launch: Callable[[], Any] = contextlib.nullcontext
        """Round the backward pass of some layers: gradients of biases and norms, which kernels leave in parts, are
        added up together."""
        if adds:
            from fasttfm.kernels.partial_sums import one_launch

            self.one_launch = partial(one_launch, {}, of_parameters)
        count = len(settings.heads)
        sublayers: list[Any] = [_Attention(settings, over_memory=bool(each), sums=adds) for each in range(count)]
        sublayers.append(_FeedForward(settings))
        sites = (*OUTPUT_SITES[:count], Site.FEED_FORWARD)
        norms = map(_Norm, settings.eps, settings.dropout_p[count + 1 :], sites)
        self.sublayers = [*zip(sublayers, norms, [adds and eps is not None for eps in settings.eps])]
        """Each with its norm, and whether that adds the bias of the last product."""
        self.size, self.products = PER_SUBLAYER * len(sublayers), 4 * len(sublayers)
        """Parameters of a layer, and those of its products, None among them."""

    def forward(
        self, y: Tensor, x: Tensor, parameters: Sequence[Any], weights: Sequence[Any], seed: LayerSeed, batch: Batch,
        stash: Stash | None, keys_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y and x behind the layer. Post-norm they are one; pre-norm y is the norm of x, and x where none follows.

        weights: of the products, four a sub-layer, in their dtype, where the parameters may have theirs;
        keys_values: as attention over the memory takes them.
        """
        norm_first, dtype = self.settings.norm_first, self.dtype
        for number, (sublayer, norm, left) in enumerate(self.sublayers):
            *first, last_bias = weights[4 * number : 4 * number + 4]
            _, _, _, bias, *of_norm = parameters[PER_SUBLAYER * number : PER_SUBLAYER * (number + 1)]
            output = sublayer.forward(
                y if y.dtype is dtype else y.to(dtype), (*first, None if left else last_bias), seed, batch, self.route,
                stash, keys_values,
            )  # fmt: skip
            y, s = norm.forward(output, bias if left else None, x, of_norm, seed, self.route, stash)
            x = s if norm_first else y
        return y, x

    def backward(
        self, dy: Tensor, ds: Tensor | None, weights: Sequence[Any], wanted: Sequence[bool], stash: Stash,
        memory: Tensor | None, d_keys_values: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[Any]]:  # fmt: skip
        """Gradients of y and of x as the layer was given them, of the memory, and of the parameters; that of x is None
        where it is added to y's already. A pair stands for the rows of a parameter. d_keys_values: as of attention.
        """
        norm_first = self.settings.norm_first
        gradients: list[Any] = []
        d_memory: Tensor | None = None
        dy2: Tensor | None = None
        d_x: Any = None
        for number in range(len(self.sublayers) - 1, -1, -1):
            sublayer, norm, left = self.sublayers[number]
            d_output, d_x, d_bias, of_norm = norm.backward(dy, dy2, ds, stash)
            *first, last_bias = weights[4 * number : 4 * number + 4]
            place = PER_SUBLAYER * number
            onto = None
            if left and not number and not norm_first and d_x.dtype is d_output.dtype:  # the product adds them
                onto, d_x = d_x, None
            dy, of_memory, of_products = sublayer.backward(
                d_output, (*first, None if left else last_bias), wanted[place : place + 4], stash, memory,
                d_keys_values, onto,
            )  # fmt: skip
            if left:
                of_products[3] = d_bias
            d_memory = of_memory if d_memory is None else d_memory
            gradients = [*of_products, *of_norm, *gradients]
            dy2, ds = (None, d_x) if norm_first else (d_x, None)
        return dy, d_x, d_memory, gradients

    def by_operators(
        self, y: Tensor, x: Tensor, parameters: Sequence[Any], seed: LayerSeed, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """forward() in operators that autograd differentiates, a second time too."""
        for number, (sublayer, norm, _) in enumerate(self.sublayers):
            *given, weight, bias = parameters[PER_SUBLAYER * number : PER_SUBLAYER * (number + 1)]
            weights = [each if each is None else each.to(self.dtype) for each in given]
            output = sublayer.by_operators(y.to(self.dtype), weights, seed, batch)
            dropout = seed.dropout(norm.site, norm.p).options()
            if norm.eps is None:
                y = s = F.residual_add(output, x, **dropout)
            else:
                y, s = F.residual_layer_norm(output, x, weight, bias, norm.eps, **dropout)
            x = s if self.settings.norm_first else y
        return y, x
