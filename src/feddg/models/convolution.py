"""Convolutions on maps of a few places, as one matrix product.

The last stages of a ResNet see maps of 2 x 2 to 4 x 4 places when images are small. There the CPU's
convolution kernels spend most of their time moving weights: written as a matrix product over the
windows of the map, the same sum takes a fifth to two thirds of the time (``docs/performance.md``).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.models.precision import multiplies_tiles

MOST_PLACES = {torch.float32: 9, torch.bfloat16: 16 if multiplies_tiles() else 4}
"""Up to so many places of the result a matrix product is faster, by type of arithmetic."""


class SmallMapConv2d(nn.Conv2d):
    """A convolution that turns into a matrix product on a CPU when its result is a tiny map."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps ``(B, C, H, W)`` to ``(B, O, H', W')``, as ``Conv2d`` does."""
        height, width = self._result(input.shape[-2]), self._result(input.shape[-1])
        if height * width > MOST_PLACES.get(_arithmetic(input), 0):
            return super().forward(input)
        padding = int(self.padding[0])
        places = functional.pad(input.permute(0, 2, 3, 1), (0, 0) + (padding,) * 4)
        kernel, stride = self.kernel_size[0], self.stride[0]
        down, across = (stride * (size - 1) + 1 for size in (height, width))
        windows = [
            places[:, y : y + down : stride, x : x + across : stride]
            for y in range(kernel)
            for x in range(kernel)
        ]
        # In channels-last memory order this view of the weight costs nothing.
        weight = self.weight.permute(0, 2, 3, 1).reshape(self.out_channels, -1)
        result = functional.linear(torch.cat(windows, dim=-1), weight, self.bias)
        return result.permute(0, 3, 1, 2)

    def _result(self, size: int) -> int:
        return (size + 2 * int(self.padding[0]) - self.kernel_size[0]) // self.stride[0] + 1


def _arithmetic(input: Tensor) -> torch.dtype:
    if input.device.type != "cpu":
        return torch.int8  # never
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return input.dtype


def use_small_map_convolutions(network: nn.Module) -> None:
    """Has every plain square convolution of the network take the faster way; in place.

    Names, parameters and results stay, up to rounding.
    """
    for module in network.modules():
        if type(module) is nn.Conv2d and _is_plain(module):
            module.__class__ = SmallMapConv2d


def use_plain_convolutions(network: nn.Module) -> None:
    """Undoes :func:`use_small_map_convolutions`, in place: for graphs that leave PyTorch."""
    for module in network.modules():
        if type(module) is SmallMapConv2d:
            module.__class__ = nn.Conv2d  # type: ignore[assignment]


def _is_plain(layer: nn.Conv2d) -> bool:
    pairs = (layer.kernel_size, layer.stride, layer.dilation)
    square = all(a == b for a, b in pairs) and not isinstance(layer.padding, str)
    return (
        square
        and layer.padding[0] == layer.padding[1]
        and layer.dilation[0] == 1
        and layer.groups == 1
        and layer.padding_mode == "zeros"
    )
