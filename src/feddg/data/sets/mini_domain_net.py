"""Mini-DomainNet: 126 classes of DomainNet in four of its domains."""

from pathlib import Path

from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.domain_net_layouts import list_domain_net
from feddg.data.images import ImageTable


def list_mini_domain_net(root: Path | None) -> ImageTable:
    """Mini-DomainNet: DomainNet's folders and Dassl's lists of them, which say class and split.

    Raises:
        DataError: a list is missing or cannot be read.
    """
    return list_domain_net(MINI_DOMAIN_NET, root, None, needs_lists=True)


MINI_DOMAIN_NET = register_data_set(
    DataSet(
        name="mini_domain_net",
        summary="Mini-DomainNet (Zhou et al. 2021): 126 classes in four domains of DomainNet",
        load=list_mini_domain_net,
        preset={
            "data": {"image_size": 96},
            "clients": {"number": 3, "partition": "domain"},
            "model": {"backbone": "resnet18", "weights": "imagenet"},
            "train": {"rounds": 60, "lr": 1e-4, "batch_size": 32, "augmentation": "domain_net"},
        },
        domains=("clipart", "painting", "real", "sketch"),
        class_count=126,
        publication=Publication(
            citation="K. Zhou, Y. Yang, Y. Qiao and T. Xiang, Domain Adaptive Ensemble Learning, "
            "IEEE TIP 2021; images: DomainNet (Peng et al. 2019)",
            address="https://github.com/KaiyangZhou/Dassl.pytorch/blob/master/DATASETS.md",
            licence="non-commercial research and education (DomainNet's fair-use notice)",
            steps=(
                "Take DomainNet (`feddg data get domain_net` or its own page).",
                "Take splits_mini.zip from the link in Dassl.pytorch's DATASETS.md, and unpack it "
                "into the folder of the domains.",
                "Give that folder as --root.",
            ),
        ),
        layouts=(
            "`domainnet/{clipart,painting,real,sketch}/<class>` and "
            "`domainnet/splits_mini/<domain>_{train,test}.txt` (Dassl)",
        ),
        protocol="one domain held out (Zhou et al.)",
    )
)
