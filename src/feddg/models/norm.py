"""Normalisation layers, found by type and never by name."""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Returns every batch-normalisation layer inside ``module`` by its full name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def statistics_names(module: nn.Module) -> set[str]:
    """Returns the state-dict names of running means, variances and counters."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in batch_norms(module).items()
        for buffer, _ in layer.named_buffers()
    }


def never_negative_names(module: nn.Module) -> set[str]:
    """Returns the state-dict names of running variances and counters, of every kind of layer."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _NormBase) and layer.track_running_stats
        for buffer in ("running_var", "num_batches_tracked")
    }


def affine_names(module: nn.Module) -> set[str]:
    """Returns the state-dict names of the layers' scales and shifts."""
    return {
        f"{name}.{parameter}" if name else parameter
        for name, layer in batch_norms(module).items()
        for parameter, _ in layer.named_parameters()
    }


def norms_and_biases(module: nn.Module) -> list[nn.Parameter]:
    """Returns what weight decay often spares: all of normalisation layers, and biases elsewhere."""
    return [
        parameter
        for layer in module.modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if name == "bias" or isinstance(layer, NORMALISATION)
    ]


def freeze_statistics(module: nn.Module) -> None:
    """Puts every batch-normalisation layer in eval mode: running statistics are used and kept.

    Scales and shifts still train. This is PARDON's official setting; call it after ``train()``.
    """
    for layer in batch_norms(module).values():
        layer.eval()


def snapshot(module: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """Returns copies of the named entries of ``module``'s state."""
    return {name: t.detach().clone() for name, t in module.state_dict().items() if name in names}
