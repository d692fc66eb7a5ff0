"""Which parts of a network are trained: all, the head, head and norm layers, or adapters."""

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from feddg.errors import ExperimentError, need
from feddg.models.network import Network
from feddg.models.normalization import NORMALISATION
from feddg.rng import DrawnFrom, derive_seed
from feddg.settings import TrainSettings


def trained_by(
    network: Network,
    change: Callable[[Network], Network],
    train: TrainSettings,
    *,
    statistics: bool = True,
) -> Network:
    """Returns a network with the changes of a method; ``frozen`` names what is not trained.

    Layers after the featurizer are always trained, and so are layers that a method adds to it.

    Args:
        network: the network as built; changed in place.
        change: makes the method's changes to it.
        train: the settings; ``trainable`` says what is trained.
        statistics: whether running statistics of normalisation layers are updated.

    Raises:
        ExperimentError: it cannot be trained as asked.
    """
    if train.trainable == "lora":
        with DrawnFrom(derive_seed(network.seed, "init", "lora")):
            add_adapters(network.featurizer, train.lora_rank)
    built = {f"featurizer.{name}" for name in network.featurizer.state_dict()}
    network = change(network)
    if train.trainable == "all":
        return network
    frozen = set()
    for prefix, module in network.named_modules():
        spared = train.trainable == "norm+head" and isinstance(module, NORMALISATION)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            adapter = train.trainable == "lora" and ".lora_" in name
            if name in built and not spared and not adapter:
                parameter.requires_grad_(False)
                frozen.add(name)
        for name, _ in module.named_buffers(prefix, recurse=False):
            if name in built and not (spared and statistics):
                frozen.add(name)
    network.frozen = frozenset(frozen)
    return network


def add_adapters(featurizer: nn.Module, rank: int) -> None:
    """Adds low-rank adapters to the linear and dense convolution layers (LoRA).

    Hu et al., ICLR 2022: ``W x + (alpha / r) B A x`` with ``B = 0`` at the start and alpha = r.
    PyTorch's own attention has none: it reads its layers' weights and does not call them.

    Args:
        featurizer: changed in place.
        rank: r, the rank.

    Raises:
        ExperimentError: the library is missing, or there is no such layer.
    """
    need("lora", "train.trainable: lora")
    from peft import LoraConfig, inject_adapter_in_model

    read = {
        part
        for layer in featurizer.modules()
        if isinstance(layer, nn.MultiheadAttention)
        for part in layer.modules()
    }
    layers = [
        name
        for name, layer in featurizer.named_modules()
        if (isinstance(layer, nn.Linear) and layer not in read)
        or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    ]
    if not layers:
        raise ExperimentError("train.trainable: lora needs a network with linear layers")
    chosen = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers, lora_dropout=0.0)
    inject_adapter_in_model(chosen, featurizer)


def digest_of(model: nn.Module, names: Iterable[str], *more: Tensor, size: int = 8) -> str:
    """Returns a digest of some entries of a model's state and more, ``size`` bytes in hex."""
    digest, state = hashlib.blake2b(digest_size=size), model.state_dict()
    named = [(name, state[name]) for name in sorted(names)]
    for name, tensor in [*named, *(("", tensor) for tensor in more)]:
        digest.update(name.encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_fixed_features(model: nn.Module) -> str:
    """Returns a digest of what a network's features depend on; empty if they may change.

    They may if the featurizer is trained or treats a batch as a whole, if something is hooked to
    it, or if the network is used in another way than by its own forward.
    """
    if not isinstance(model, Network) or model.training or "forward" in vars(model):
        return ""
    kind = type(model)
    if kind.forward is not Network.forward or kind.features is not Network.features:
        return ""
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    if hooked or any(parameter.requires_grad for parameter in model.featurizer.parameters()):
        return ""
    names = [f"featurizer.{name}" for name in model.featurizer.state_dict()]
    return digest_of(model, names, model.scale, model.shift) if names else ""


def fingerprint(model: nn.Module) -> str:
    """Returns a hash of a model's state: names and bits."""
    return digest_of(model, model.state_dict(), size=12)
