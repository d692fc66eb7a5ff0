"""Faster ways to calculate some convolutions on a CPU; names, parameters and results stay.

They apply to convolutions with a tiny result map and, in networks with depthwise layers, to
depthwise convolutions in bfloat16 and to all convolutions before frozen batch normalisation.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.models.network import tried
from feddg.models.normalization import activated, is_plain, stored
from feddg.models.precision import multiplies_tiles

MOST_PLACES = {torch.float32: 9, torch.bfloat16: 16 if multiplies_tiles() else 4}
"""Largest number of result places for which a matrix product is faster, by arithmetic type."""
IN_ORDER = (
    "ConvBnAct",
    "ConvNormAct",
    "DepthwiseSeparableConv",
    "EdgeResidual",
    "EfficientNet",
    "InvertedResidual",
    "MobileNetV3",
)
"""timm's modules in which a convolution is normalised by the next layer in order."""


def use_fast_convolutions(network: nn.Module) -> None:
    """Replaces the network's convolutions by faster ones on a CPU, in place.

    Names and parameters stay the same, results up to rounding. Networks with depthwise layers are
    left without the tiny-map version: their 1 x 1 convolutions are matrix products already.
    """
    if any(map(_is_depthwise, network.modules())):
        _use_separable_convolutions(network)
    else:
        for module in network.modules():
            if type(module) is nn.Conv2d and module.groups == 1 and _is_square(module):
                module.__class__ = SmallMapConv2d
    for module in filter(loses_bfloat16, network.modules()) if multiplies_tiles() else ():
        module.__class__ = mixed(WideConv2d, type(module))


def use_plain_convolutions(network: nn.Module) -> None:
    """Undoes :func:`use_fast_convolutions` in place, for graphs exported from PyTorch."""
    for module in network.modules():
        while isinstance(module, WideConv2d | SeparableConv | FoldedNorm | SmallMapConv2d):
            module.__class__ = type(module).__bases__[-1]


def check_convolutions(network: nn.Module, images: Tensor) -> None:
    """Puts plain convolutions back, in place, if the faster ones change what the network computes.

    They do so where layers of a ``Sequential`` are called by hand, with something between them.
    """
    if not any(isinstance(norm, FoldedNorm) for norm in network.modules()):
        return
    fast = copy.deepcopy(network)
    images = images.to(next(fast.parameters()))
    for norm in fast.modules():
        if isinstance(norm, FoldedNorm):  # the first statistics, 0 and 1, would not show it
            norm.get_buffer("running_mean").fill_(0.5)
            norm.get_buffer("running_var").fill_(0.5)
    plain = copy.deepcopy(fast)
    use_plain_convolutions(plain)
    first, other = tried(fast, images), tried(plain, images)
    if (first - other).abs().max() > 0.01 * other.abs().max():
        use_plain_convolutions(network)


def _arithmetic(input: Tensor) -> torch.dtype:
    if input.device.type != "cpu":
        return torch.int8  # never
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return input.dtype


# Convolutions on maps of a few places, as one matrix product.
#
# The last stages of a ResNet see maps of 2 x 2 to 4 x 4 places when images are small. There the
# CPU's convolution kernels spend most of their time moving weights: written as a matrix product
# over the windows of the map, the same sum takes a fifth to two thirds of the time
# (``docs/benchmarks.md``).


class SmallMapConv2d(nn.Conv2d):
    """A convolution that uses a matrix product on a CPU if its result is a tiny map."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Maps ``(B, C, H, W)`` to ``(B, O, H', W')``, as ``Conv2d`` does."""
        if input.ndim != 4 or input.shape[1] != self.in_channels:
            # One image, or one clear error.
            return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        kernel, stride, padding = self.kernel_size[0], self.stride[0], int(self.padding[0])
        height, width = ((n + 2 * padding - kernel) // stride + 1 for n in input.shape[-2:])
        if min(height, width) < 1 or height * width > MOST_PLACES.get(_arithmetic(input), 0):
            return super()._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        places = functional.pad(input.permute(0, 2, 3, 1), (0, 0) + (padding,) * 4)
        down, across = (stride * (size - 1) + 1 for size in (height, width))
        windows = [
            places[:, y : y + down : stride, x : x + across : stride]
            for y in range(kernel)
            for x in range(kernel)
        ]
        # In channels-last memory order this view of the weight costs nothing.
        weight = weight.permute(0, 2, 3, 1).reshape(self.out_channels, -1)
        result = functional.linear(torch.cat(windows, dim=-1), weight, bias)
        return result.permute(0, 3, 1, 2)


def loses_bfloat16(layer: nn.Module) -> bool:
    """Returns whether stock PyTorch may give a layer NaN gradients in bfloat16 on CPUs with AMX.

    So it does for 3 x 3 convolutions of stride 2 with at most 16 channels in or out, where memory
    that was freed holds NaN: they are calculated in float32 there. Depthwise ones have
    kernels of their own here.
    """
    return (
        isinstance(layer, nn.Conv2d)
        and layer.groups == 1
        and (tuple(layer.kernel_size), tuple(layer.stride)) == ((3, 3), (2, 2))
        and min(layer.in_channels, layer.out_channels) <= 16
    )


class WideConv2d:
    """Mixed in before a convolution's own class: calculates in float32 under autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps ``(B, C, H, W)`` to ``(B, O, H', W')``, as the layer does."""
        if _arithmetic(input) != torch.bfloat16:
            return super().forward(input)  # type: ignore[misc, no-any-return]
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())  # type: ignore[misc, no-any-return]


def _is_square(layer: nn.Conv2d) -> bool:
    pairs = (layer.kernel_size, layer.stride, layer.dilation)
    square = all(a == b for a, b in pairs) and not isinstance(layer.padding, str)
    return (
        square
        and layer.padding[0] == layer.padding[1]
        and layer.dilation[0] == 1
        and layer.padding_mode == "zeros"
    )


# Depthwise convolutions in bfloat16, by the kernels that are fast.
#
# Of the backward pass through a depthwise convolution PyTorch's CPU kernels have two fast parts in
# bfloat16: the weights' gradient of a 3 x 3 kernel, and a forward pass. The rest is up to a hundred
# times slower, and nine tenths of EfficientNet-Lite's step. So a larger kernel's gradient is put
# together from windows of 3 x 3, and the input's gradient is a forward pass: the flipped kernel
# over the result's gradient, with zeros between its places where there is a stride.


class _Depthwise(torch.autograd.Function):
    """A depthwise convolution whose backward pass can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
    ) -> Tensor:
        """Convolves maps ``(B, C, H, W)`` with ``(C, 1, k, k)``."""
        return functional.conv2d(input, weight, bias, stride, padding, 1, len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(input, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = _input_gradient(gradient, input, weight, ctx.stride, ctx.padding)
        if ctx.needs_input_grad[1]:
            of_weight = _weight_gradient(gradient, input, weight, ctx.stride, ctx.padding)
        if ctx.biased and ctx.needs_input_grad[2]:
            of_bias = gradient.sum((0, 2, 3))
        return of_input, of_weight, of_bias, None, None


def _input_gradient(
    gradient: Tensor, input: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    middle, places = weight.shape[-1] // 2, gradient
    if stride > 1 or padding != middle:
        count, channels, height, width = input.shape
        places = gradient.new_zeros((count, height, width, channels)).permute(0, 3, 1, 2)
        apart = places[:, :, middle - padding :: stride, middle - padding :: stride]
        apart[:, :, : gradient.shape[-2], : gradient.shape[-1]] = gradient
    return functional.conv2d(places, weight.flip(2, 3), None, 1, middle, 1, len(weight))


def _weight_gradient(
    gradient: Tensor, input: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    kernel = weight.shape[-1]
    if kernel == 3:
        return _window_gradient(gradient, input, weight, stride, padding)
    padded = functional.pad(input, (padding,) * 4)
    down, across = (stride * (size - 1) + 3 for size in gradient.shape[-2:])
    result = gradient.new_zeros(weight.shape)
    starts = [*range(0, kernel - 3, 3), kernel - 3]
    for y, x in itertools.product(starts, starts):
        window = padded[:, :, y : y + down, x : x + across]
        part = weight[:, :, y : y + 3, x : x + 3]
        result[:, :, y : y + 3, x : x + 3] = _window_gradient(gradient, window, part, stride, 0)
    return result


def _window_gradient(
    gradient: Tensor, input: Tensor, weight: Tensor, stride: int, padding: int
) -> Tensor:
    """Returns PyTorch's own gradient with respect to the weight."""
    sizes, wanted = ([stride] * 2, [padding] * 2, [1, 1]), [False, True, False]
    return torch.ops.aten.convolution_backward(
        gradient, input, weight, None, *sizes, False, [0, 0], len(weight), wanted
    )[1]


def _is_depthwise(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and layer.groups == layer.in_channels == layer.out_channels > 1
        and _is_square(layer)
        and layer.kernel_size[0] % 2 == 1
        and layer.kernel_size[0] >= 3
        and int(layer.padding[0]) <= layer.kernel_size[0] // 2
    )


# Frozen batch normalisation as a part of the convolution before it.
#
# In a network of depthwise and 1 x 1 convolutions, normalising a map takes as long as making it:
# all wait for memory. With kept statistics it is a factor and a shift of each channel,
#
#     gamma (W x + b - mean) / deviation + beta  =  (s W) x + (s (b - mean) + beta),
#     s = gamma / deviation,
#
# and W, b, gamma and beta have the gradients that they have apart.


class SeparableConv:
    """Mixed in before a convolution's class, in a network with depthwise layers.

    Attributes:
        norm: the normalisation layer that uses only this layer's result, if any; in a tuple, so
            that it does not become a submodule.
    """

    norm: tuple[nn.BatchNorm2d] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Maps ``(B, C, H, W)`` to ``(B, O, H', W')``, normalised if ``norm`` is frozen."""
        assert isinstance(self, nn.Conv2d)
        weight, bias = self.weight, self.bias
        norm = self.norm[0] if self.norm and _folds(self, self.norm[0], input) else None
        if norm is not None:
            mean, variance = stored(norm)
            scale = norm.weight * (variance + norm.eps).rsqrt()
            mean = mean if bias is None else mean - bias
            weight, bias = weight * scale[:, None, None, None], norm.bias - mean * scale
        result = _convolved(self, input, weight, bias)
        if norm is not None:
            result.normalised_by = norm  # type: ignore[attr-defined]
        return result


class FoldedNorm:
    """Mixed in before a normalisation's class, for a layer after a :class:`SeparableConv`."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalises ``(B, C, H, W)``, unless the convolution already did."""
        assert isinstance(self, nn.Module)
        if getattr(input, "normalised_by", None) is self:
            return activated(self, input)
        return super().forward(input)  # type: ignore[misc]


def _folds(layer: nn.Conv2d, norm: nn.BatchNorm2d, input: Tensor) -> bool:
    """Returns whether a normalisation is frozen and nothing reads the values before it."""
    watched = layer._forward_hooks or norm._forward_hooks or norm._forward_pre_hooks
    # A weight that is not trained would need a gradient for the sake of the normalisation's.
    spared = norm.weight.requires_grad and not layer.weight.requires_grad
    return (
        input.device.type == "cpu"
        and input.ndim == 4
        and not norm.training
        and "forward" not in vars(norm)  # see normalised_by
        and not watched
        and not spared
    )


def _convolved(layer: nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.ndim != 4 or input.shape[1] != layer.in_channels:
        return layer._conv_forward(input, weight, bias)  # one image, or one clear error
    # timm's TensorFlow padding depends on the input size.
    if any(kind.__name__ == "Conv2dSame" for kind in type(layer).__mro__):
        from timm.layers.padding import pad_same

        input = pad_same(input, list(layer.kernel_size), list(layer.stride))
    if _is_depthwise(layer) and _arithmetic(input) == torch.bfloat16:
        arguments = (t if t is None else t.bfloat16() for t in (input, weight, bias))
        stride, padding = layer.stride[0], int(layer.padding[0])
        result: Tensor = _Depthwise.apply(*arguments, stride, padding)  # type: ignore[no-untyped-call]
        return result
    return layer._conv_forward(input, weight, bias)


def _use_separable_convolutions(network: nn.Module) -> None:
    pairs = dict(_normalised(network))
    for layer in list(network.modules()):
        if type(layer) is nn.Conv2d or type(layer).__name__ == "Conv2dSame":
            if layer in pairs:
                vars(layer)["norm"] = (pairs[layer],)
            if layer in pairs or _is_depthwise(layer):
                layer.__class__ = mixed(SeparableConv, type(layer))
    for norm in pairs.values():
        norm.__class__ = mixed(FoldedNorm, type(norm))


def _normalised(network: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yields convolutions, each with the running-statistics layer that normalises its result."""
    for parent in network.modules():
        ordered = type(parent).forward is nn.Sequential.forward
        if ordered or type(parent).__name__ in IN_ORDER:
            for layer, norm in itertools.pairwise(parent.children()):
                if isinstance(layer, nn.Conv2d) and is_plain(norm):
                    yield layer, norm


_classes: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}
"""Cache of classes, by the mixed-in class and the layer's own class."""


def mixed(before: type, kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a layer's class with another mixed in before it."""
    made = type(f"{before.__name__}{kind.__name__}", (before, kind), {"__module__": __name__})
    return _classes.setdefault((before, kind), made)
