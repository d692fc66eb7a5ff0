"""A shared model as a folder, on disk or on the Hugging Face hub: configuration and weights.

``config.json`` contains what is needed to rebuild the network and prepare images,
``model.safetensors`` its state. They contain nothing about training images or clients, and no
paths: see :class:`NetworkConfig` for the shared settings.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from feddg.data.mirror import hub_fault
from feddg.errors import FeddgError, RunError, schema_faults
from feddg.experiment import Experiment
from feddg.federation.federation import untrained_network
from feddg.federation.local_training import load_weights
from feddg.messages import first_not_finite
from feddg.methods.base import Method
from feddg.methods.composition import build_method
from feddg.models.backbones import FEATURES
from feddg.models.network import Network
from feddg.models.normalization import never_negative_names
from feddg.prediction.model_file import ModelDescription
from feddg.records import JsonFile, Row
from feddg.settings import Fields, Positive
from feddg.storage import digest, file_faults, read_text

CONFIG, WEIGHTS = "config.json", "model.safetensors"
HUB = "hf:"
SCHEMA = 1
"""Increased when folders of an earlier version can no longer be read."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class NetworkConfig(Row):
    """The settings that rebuild a network; the only part of an experiment that is shared.

    Attributes:
        method: its name and settings, without files.
        model: backbone, embedding, normalisation.
        train: which parts are trained, and the adapters' rank.
        mean: channel means of the colours that it expects.
        std: their standard deviations.
        seed: what a network that predicts by samples draws them from (FedSR).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: Fields
    model: Fields
    train: Fields
    mean: tuple[Finite, Finite, Finite]
    std: tuple[Positive, Positive, Positive]
    seed: int = 0

    def experiment(self, about: ModelDescription) -> Experiment:
        """Returns an experiment with these settings, and defaults for all others.

        Args:
            about: says what the network takes.

        Raises:
            ExperimentError: one is unknown or out of range.
        """
        data: Fields = {"image_size": about.image_size}
        if about.features is not None:
            data |= {"source": FEATURES, "features": about.features}
        return Experiment(
            method=self.method,
            model={**self.model, "weights": None},
            train=self.train,
            data=data,
            seed=self.seed,
        )


class SharedModel(JsonFile):
    """The file ``config.json``.

    Attributes:
        feddg_model: number of the schema.
        weights_sha256: SHA-256 of the weights file.
        network: settings that rebuild the network.
        about: description of the model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    feddg_model: int
    weights_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    network: NetworkConfig
    about: ModelDescription


def network_config(experiment: Experiment, method: Method, network: Network) -> NetworkConfig:
    """Returns the settings that rebuild a trained network."""
    settings, train = method.settings, experiment.train
    return NetworkConfig(
        method={"name": method.name, "settings": _without_paths(settings.model_dump())},
        model=experiment.model.model_dump(include={"backbone", "embedding", "normalization"}),
        train=train.model_dump(include={"trainable", "lora_rank"}),
        mean=network.mean,
        std=network.std,
        seed=experiment.seed,
    )


def _without_paths(value: object) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_paths(v) for k, v in value.items() if not isinstance(v, Path)}
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value if not isinstance(item, Path)]
    return value


def is_shared(folder: Path) -> bool:
    """Whether a folder holds a shared model rather than a run."""
    return (folder / CONFIG).is_file()


def read_shared(folder: Path) -> SharedModel:
    """Reads the configuration of a shared model.

    Raises:
        RunError: it is not from feddg, is damaged, or is from a newer version.
    """
    path = folder / CONFIG
    try:
        fields = from_json(read_text(path))
        is_newer = fields["feddg_model"] > SCHEMA
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"{folder} holds no model of feddg: its {CONFIG} is another program's, or damaged"
        ) from None
    if is_newer:
        raise RunError(f"{path} was written by a newer version of feddg: pip install -U feddg")
    with schema_faults(RunError, f"{path} is damaged: "):
        return SharedModel.model_validate(fields)


def load_shared(folder: Path) -> tuple[SharedModel, Experiment, Method, Network]:
    """Reads a shared model, and builds its network with its weights; nothing is unpickled.

    Raises:
        RunError: there is no model, or its weights have changed, do not fit, or are no usable
            numbers.
    """
    config, path = read_shared(folder), folder / WEIGHTS
    with file_faults(RunError, f"Cannot read {path}"):
        sha256 = digest(path)
    if sha256 != config.weights_sha256:
        raise RunError(
            f"{path} is not the file that {CONFIG} names: its SHA-256 is {sha256}, not "
            f"{config.weights_sha256}; get both again"
        )
    with file_faults(RunError, f"{path} cannot be read as safetensors", SafetensorError):
        weights = load_file(path)
    try:
        experiment = config.network.experiment(config.about)
        method = build_method(experiment.method.name, experiment.method.settings)
        build = partial(untrained_network, experiment, method, len(config.about.class_names))
        # Shapes first, without memory: the configuration may name a network of any size.
        try:
            with torch.device("meta"):
                shapes = build()
        except NotImplementedError:
            # Some layers' sizes are computed from values, which meta tensors lack.
            with _EmptyOnMeta():
                shapes = build()
        shapes.load_state_dict(weights, assign=True)  # without copies
        network = build()
    except (FeddgError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise RunError(f"{path} does not fit {folder / CONFIG}: {reason}") from None
    network.normalize_by(config.network.mean, config.network.std)
    bad = first_not_finite(weights)
    below = {name for name in never_negative_names(network) if (weights[name] < 0).any()}
    if bad or below:
        what = f"{bad!r} is not finite" if bad else f"the variance {min(below)!r} is below 0"
        raise RunError(f"{path} holds no usable model: {what} (was it changed, or did it diverge?)")
    load_weights(network, weights)
    return config, experiment, method, network


class _EmptyOnMeta(TorchFunctionMode):
    """Gives new weights no memory, but leaves tensors that are computed as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`torch.overrides.TorchFunctionMode`."""
        place = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **place})


def at_hand(name: Path | str) -> Path:
    """Returns the named folder; ``hf:owner/name@revision`` is downloaded once.

    The environment variables ``HF_TOKEN``, ``HF_HOME`` and ``HF_ENDPOINT`` are used.

    Raises:
        RunError: it cannot be loaded, or contains no model of feddg.
    """
    text = name.as_posix() if isinstance(name, Path) else name
    if not text.startswith(HUB):
        return Path(name)
    from huggingface_hub import hf_hub_download

    repository, _, revision = text.removeprefix(HUB).partition("@")
    try:
        folder = Path(hf_hub_download(repository, CONFIG, revision=revision or None)).parent
        read_shared(folder)  # before weights of another program's model
        hf_hub_download(repository, WEIGHTS, revision=folder.name)
    except RunError:
        raise
    except Exception as error:  # it raises what its many parts raise
        raise RunError(f"Cannot load {text}: {hub_fault(error)}.") from None
    return folder
