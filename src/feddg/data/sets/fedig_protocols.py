"""FedIG's protocols for four domains of any data set (its sections 4.1 and A.6)."""

from typing import Any

from feddg.data.data_set import DataSet, register_data_set
from feddg.settings import merge

FEDIG: dict[str, Any] = {
    "data": {"image_size": 224, "id_val": 0.2, "id_test": 0.0},
    "clients": {"number": 3, "partition": "domain"},
    "model": {
        "backbone": "resnet18",
        "weights": "imagenet",
        "embedding": "bottleneck",
        "normalization": "train",
    },
    "train": {
        "rounds": 40,
        "local_steps": 200,
        "batch_size": 64,
        "optimizer": "sgd",
        "lr": 0.01,
        "momentum": 0.5,
        "augmentation": "pacs",
    },
}
SILOS: dict[str, Any] = {
    "clients": {"number": 30, "per_round": 10},
    "train": {"rounds": 120, "local_steps": 20},
}


def _instead(name: str) -> str:
    return (
        "it is a protocol for images of another data set. Name theirs as the source and this one "
        f"as the preset: --data pacs --root FOLDER --preset {name}"
    )


register_data_set(
    DataSet(
        name="fedig",
        summary="FedIG's protocol for four domains: one domain per client",
        instead=_instead("fedig"),
        preset=FEDIG,
    )
)
register_data_set(
    DataSet(
        name="fedig_silos",
        summary="FedIG's protocol for four domains: ten clients per domain, with clients.alpha for "
        "label skew",
        instead=_instead("fedig_silos"),
        preset=merge(FEDIG, SILOS),
    )
)
