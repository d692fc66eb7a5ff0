"""Codecs of the VGG-19 shape with random weights, and their files."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from feddg.styles.codecs import Vgg19Codec
from scripts import load_script

training = load_script(Path(__file__).parents[2] / "benchmarks/codec/train.py")
initialised, untrained = training.initialised, training.untrained


def vgg19_modules(divisor: int = 1) -> tuple[nn.Sequential, nn.Sequential]:
    """A pair of VGG-19 with every width divided, but those of colours."""
    shape = Vgg19Codec.architecture
    encoder, decoder = (
        [entry // divisor if isinstance(entry, int) and entry > 3 else entry for entry in plan]
        for plan in (shape.encoder, shape.decoder)
    )
    modules = replace(shape, encoder=encoder, decoder=decoder).modules()
    return initialised(modules[0], 0, "encoder"), initialised(modules[1], 0, "decoder")


def write_vgg19(folder: Path, divisor: int = 8) -> dict[str, Path]:
    """Random weights under the names and with the keys of the common files."""
    encoder, decoder = vgg19_modules(divisor)
    deeper = {"31.weight": torch.zeros(1), "51.weight": torch.zeros(512, 512, 3, 3)}
    paths = {"encoder": folder / "vgg_normalised.pth", "decoder": folder / "decoder.pth"}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(encoder.state_dict() | deeper, paths["encoder"])
    torch.save(decoder.state_dict(), paths["decoder"])
    return paths
