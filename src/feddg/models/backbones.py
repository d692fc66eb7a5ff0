"""Backbones by name: torchvision's and a small CNN, with weights from torchvision or a file."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.error import URLError

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from feddg.errors import ExperimentError, WeightsError, nearest
from feddg.models.network import Embedding, Network
from feddg.models.precision import multiplies_tiles
from feddg.rng import derive_seed
from feddg.settings import TORCHVISIONS
from feddg.storage import is_file, why

HEAD_NAMES = ("fc", "classifier", "heads", "head")
_OWN: dict[str, Callable[[], nn.Module]] = {}


def register_backbone(name: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Registers a function that builds a featurizer with ``out_features`` (and ``stages``)."""

    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        _OWN[name] = build
        return build

    return add


class SmallCNN(nn.Module):
    """Three blocks of convolution, pooling, BatchNorm and ReLU, then a linear layer; for 32 pixels.

    The 4 x 4 map is flattened, not averaged: where a stroke is tells digits apart. Other image
    sizes are pooled to the same map. 357 k weights.
    """

    def __init__(self, widths: tuple[int, int, int] = (32, 64, 128), features: int = 128) -> None:
        super().__init__()
        self.out_features = features
        before = (3, *widths[:-1])
        self.blocks = nn.Sequential(*(_block(a, b) for a, b in zip(before, widths)))
        self.pool = nn.AdaptiveAvgPool2d(4)
        # Without the LayerNorm, Adam's first steps push most units' inputs below zero for good.
        self.linear = nn.Sequential(nn.Linear(16 * widths[-1], features), nn.LayerNorm(features))

    @property
    def stages(self) -> list[nn.Module]:
        """The three blocks."""
        return list(self.blocks)

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, 128)``."""
        maps: Tensor = self.blocks(images)
        if maps.shape[-2:] != (4, 4):
            maps = self.pool(maps)
        features: Tensor = self.linear(maps.flatten(1)).relu()
        return features


def _block(inputs: int, outputs: int) -> nn.Sequential:
    # Pooling comes right after the convolution: what follows then touches a quarter of the map.
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.ReLU())


register_backbone("cnn")(SmallCNN)


class GroupNormCNN(nn.Module):
    """Three blocks of convolution, GroupNorm, ReLU and pooling; 4 k weights, no batch statistics.

    For noise that protects: it is as large for one weight as for a million, and a network without
    batch statistics trains each image by itself. GroupNorm: Wu and He (ECCV 2018).
    """

    def __init__(self, widths: tuple[int, int, int] = (8, 16, 16)) -> None:
        super().__init__()
        self.out_features = 16 * widths[-1]
        before = (3, *widths[:-1])
        self.blocks = nn.Sequential(*(_group_block(a, b) for a, b in zip(before, widths)))
        self.pool = nn.AdaptiveAvgPool2d(4)

    @property
    def stages(self) -> list[nn.Module]:
        """The three blocks."""
        return list(self.blocks)

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, 256)``."""
        maps: Tensor = self.pool(self.blocks(images))
        return maps.flatten(1)


def _group_block(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2))


register_backbone("cnn_gn")(GroupNormCNN)


class Trunk(nn.Module):
    """A classifier whose last linear layer was taken off: torchvision's, or at a known place."""

    def __init__(self, model: nn.Module, head: str | None = None) -> None:
        super().__init__()
        self.head, self.model = head or _head_of(model), model
        parent, _, name = self.head.rpartition(".")
        self.out_features = int(model.get_submodule(self.head).in_features)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), name, nn.Identity())

    @property
    def stages(self) -> list[nn.Module]:
        """Residual stages (ResNet family), or dense blocks, or the children of ``features``."""
        names = [f"layer{i}" for i in range(1, 5)]
        if all(hasattr(self.model, name) for name in names):
            return [getattr(self.model, name) for name in names]
        children = dict(getattr(self.model, "features", nn.Module()).named_children())
        dense = [layer for name, layer in children.items() if name.startswith("denseblock")]
        return dense or list(children.values())

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, out_features)``."""
        features: Tensor = self.model(images)
        return features.flatten(1)


def _head_of(model: nn.Module) -> str:
    """Returns the name of a torchvision classifier's last linear layer."""
    for name in HEAD_NAMES:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            return name
        if isinstance(head, nn.Sequential):
            last, linear = list(head.named_children())[-1]
            if isinstance(linear, nn.Linear):
                return f"{name}.{last}"
    raise ExperimentError(
        f"backbone {type(model).__name__} has no linear head that feddg knows how to take off; "
        "register your own with feddg.models.backbones.register_backbone"
    )


class Whole(nn.Module):
    """A classifier as it is, where its last layer is not a linear one: it gives logits."""

    def __init__(self, model: nn.Module, classes: int) -> None:
        super().__init__()
        self.model, self.out_features = model, classes

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, classes)``."""
        logits: Tensor = self.model(images)
        return logits


def split_network(
    model: nn.Module,
    images: Tensor,
    seed: int = 0,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Network:
    """Takes a classifier apart, into a featurizer and its last linear layer; its weights stay.

    The last linear layer is found by what goes through it: its outputs must be the logits. Without
    one the featurizer gives the logits, and the network's classifier changes nothing.

    Args:
        model: maps images to logits ``(B, classes)``.
        images: a few, ``(B, 3, H, W)`` in [0, 1].
        seed: for layers that a method adds.
        normalize: mean and standard deviation of the colours that it expects; none for images in
            [0, 1].

    Raises:
        ExperimentError: it cannot be given such images, or gives no logits.
    """
    mean, deviation = normalize or ((0.0,) * 3, (1.0,) * 3)
    scale, shift = 1 / torch.tensor(deviation), -torch.tensor(mean) / torch.tensor(deviation)
    inputs = images * scale.view(3, 1, 1) + shift.view(3, 1, 1)
    seen: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, given, out, name=name: seen.update({name: out}))
        for name, layer in model.named_modules()
        if name and isinstance(layer, nn.Linear)
    ]
    training = model.training
    try:
        with torch.no_grad():
            logits = model.eval()(inputs.to(next(model.parameters())))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ExperimentError(
            f"{type(model).__name__} cannot be given images {tuple(images.shape)}: {reason}"
        ) from None
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(images):
        raise ExperimentError(f"{type(model).__name__} must map images to logits (B, classes)")
    classes = logits.shape[1]
    head = next((name for name, out in seen.items() if out is logits), None)
    linear = None if head is None else model.get_submodule(head)
    with torch.random.fork_rng(devices=[]):
        network = Network(Trunk(model, head) if head else Whole(model, classes), classes, seed=seed)
    network.classifier = linear or nn.Identity()
    network.scale, network.shift = scale.view(3, 1, 1), shift.view(3, 1, 1)
    return network


def backbone_names() -> list[str]:
    """Returns the names that :func:`build_network` accepts."""
    import torchvision  # a second, and the small CNN needs nothing of it

    return sorted({*_OWN, *torchvision.models.list_models(module=torchvision.models)})


def build_network(
    backbone: str,
    classes: int,
    *,
    weights: str | None,
    embedding: Embedding = "none",
    seed: int = 0,
) -> Network:
    """Builds the network, initialised from named streams, with pretrained weights if asked.

    Args:
        backbone: ``cnn``, or any torchvision classification model by name (``resnet18``, ...).
        classes: number of classes.
        weights: None, ``imagenet`` (torchvision's, downloaded) or a ``.safetensors``/``.pth`` file.
        embedding: see :class:`Network`.
        seed: the experiment's seed; initial weights come from its stream ``("init")``.

    Raises:
        ExperimentError: unknown backbone.
        WeightsError: the weights cannot be had or do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init"))
        featurizer = _featurizer(backbone)
        if weights is not None:
            load_pretrained(featurizer, backbone, weights)
        return Network(featurizer, classes, embedding, seed)


def _featurizer(backbone: str) -> nn.Module:
    if backbone in _OWN:
        return _OWN[backbone]()
    if backbone not in backbone_names():
        hint = nearest(backbone, backbone_names())
        raise ExperimentError(
            f"unknown backbone {backbone!r}{hint}; known are 'cnn' and torchvision's models"
        )
    import torchvision

    options = {"init_weights": True} if backbone in ("googlenet", "inception_v3") else {}
    return Trunk(torchvision.models.get_model(backbone, weights=None, **options))


def load_pretrained(featurizer: nn.Module, backbone: str, weights: str) -> None:
    """Loads pretrained weights into a featurizer; the file's classification head is left out.

    Raises:
        WeightsError: naming the file, what does not fit and the remedy.
    """
    state = _imagenet(backbone) if weights == TORCHVISIONS else read_weights(Path(weights))
    target = featurizer.model if isinstance(featurizer, Trunk) else featurizer
    head = featurizer.head if isinstance(featurizer, Trunk) else "classifier"
    state = {name: tensor for name, tensor in state.items() if not name.startswith(f"{head}.")}
    expected = target.state_dict()
    counters = {name for name in expected if name.endswith("num_batches_tracked")}
    missing = sorted(expected.keys() - state.keys() - counters)
    unknown = sorted(state.keys() - expected.keys())
    wrong = [
        name for name in state if name in expected and state[name].shape != expected[name].shape
    ]
    if missing or unknown or wrong:
        raise WeightsError(_misfit(weights, backbone, missing, unknown, wrong, state, expected))
    target.load_state_dict(state, strict=False)


def _misfit(
    weights: str,
    backbone: str,
    missing: list[str],
    unknown: list[str],
    wrong: list[str],
    state: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> str:
    faults = []
    if wrong:
        name = wrong[0]
        faults.append(
            f"{name} has shape {tuple(state[name].shape)} instead of {tuple(expected[name].shape)}"
        )
    faults += [f"{missing[0]} is missing ({len(missing)} in all)"] if missing else []
    faults += [f"{unknown[0]} is not part of it ({len(unknown)} in all)"] if unknown else []
    return (
        f"weights file {weights} does not fit backbone {backbone!r}: {'; '.join(faults)}. "
        "Choose the backbone that the file was made for, or another file"
    )


def fetch_imagenet(backbone: str) -> None:
    """Sees to it that ImageNet weights are on this machine; downloads them where they are not.

    Raises:
        WeightsError: there are none, or they cannot be downloaded.
    """
    import torchvision

    try:
        known = next(iter(torchvision.models.get_model_weights(backbone)))
        there = Path(torch.hub.get_dir()) / "checkpoints" / Path(known.url).name
    except ValueError:
        there = None
    if there is None or not there.is_file():
        _imagenet(backbone)


def _imagenet(backbone: str) -> dict[str, Tensor]:
    import torchvision

    try:
        choices = torchvision.models.get_model_weights(backbone)
    except ValueError:
        raise WeightsError(
            f"torchvision has no ImageNet weights for backbone {backbone!r}"
        ) from None
    version = next(iter(choices))
    try:
        return dict(version.get_state_dict(progress=False, check_hash=True))
    except (URLError, OSError, RuntimeError) as error:
        raise WeightsError(
            f"cannot download ImageNet weights for {backbone!r} ({error}). Without a network, give "
            "a weights file (--weights FILE.safetensors) or train from scratch (--weights none, "
            "which chooses a small network, image size and learning rate that learn)"
        ) from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a ``.safetensors`` file or a torch state dict; float entries become float32.

    Raises:
        WeightsError: the file is missing or is not a state dict. Nothing is ever unpickled.
    """
    if not is_file(path, WeightsError):
        raise WeightsError(f"weights file {path} does not exist; check --weights")
    try:
        state = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except OSError as error:
        raise WeightsError(f"weights file {path} cannot be read: {why(error)}") from None
    except Exception:  # what is wrong with which byte, or torch's advice to trust the file
        kind = "safetensors file" if path.suffix == ".safetensors" else "PyTorch state dict"
        raise WeightsError(
            f"weights file {path} is not a plain {kind}: it is damaged, or of another kind, or "
            "holds more than tensors; save model.state_dict() alone, best as .safetensors, or "
            "name another file"
        ) from None
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(
        isinstance(tensor, Tensor) for tensor in state.values()
    ):
        raise WeightsError(f"weights file {path} does not hold a state dict of tensors")
    return {
        name.removeprefix("module."): tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def weights_digest(weights: str | None) -> str | None:
    """Returns a short hash of a weights file, or the name for ``imagenet`` and None."""
    if weights is None or weights == TORCHVISIONS:
        return weights
    with Path(weights).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


# Convolutions on maps of a few places, as one matrix product.
#
# The last stages of a ResNet see maps of 2 x 2 to 4 x 4 places when images are small. There the
# CPU's convolution kernels spend most of their time moving weights: written as a matrix product
# over the windows of the map, the same sum takes a fifth to two thirds of the time
# (``docs/benchmarks.md``).


MOST_PLACES = {torch.float32: 9, torch.bfloat16: 16 if multiplies_tiles() else 4}
"""Up to so many places of the result a matrix product is faster, by type of arithmetic."""


class SmallMapConv2d(nn.Conv2d):
    """A convolution that turns into a matrix product on a CPU when its result is a tiny map."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps ``(B, C, H, W)`` to ``(B, O, H', W')``, as ``Conv2d`` does."""
        if input.ndim != 4 or input.shape[1] != self.in_channels:
            return super().forward(input)  # one image, or one clear error
        height, width = self._result(input.shape[-2]), self._result(input.shape[-1])
        if min(height, width) < 1 or height * width > MOST_PLACES.get(_arithmetic(input), 0):
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
