"""Rotated MNIST: handwritten digits, a sixth of them turned by each of six angles."""

from pathlib import Path

import numpy as np

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, PublishedFile, register_data_set
from feddg.data.drawn import as_rgb, kept_drawn
from feddg.data.images import ImageTable
from feddg.data.mnist_files import mnist_files, turned_digits
from feddg.data.published import compare_counts, published_root

ANGLES = (0, 15, 30, 45, 60, 75)
_STORE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def draw_rotated_mnist(root: Path | None) -> ImageTable:
    """MNIST's 70,000 digits, dealt out evenly to six domains and turned by their angle.

    As DomainBed does, training and test digits are shuffled together and each is in one domain. The
    shuffle is ours and always the same; DomainBed's depends on its seed.

    Args:
        root: the folder of MNIST's four files, as published or unpacked, or one around it.

    Raises:
        DataError: a file is missing or of another form.
    """
    files = mnist_files(published_root(ROTATED_MNIST, root))
    grey, facts = kept_drawn(
        [file for pair in files for file in pair],
        "rotated mnist 1",
        lambda: turned_digits(files, ANGLES),
    )
    labels = facts["label"].astype(np.int64)
    domains = facts["domain"].astype(np.int64)
    table = ImageTable(
        paths=tuple(
            f"{ROTATED_MNIST.domains[domain]}/{label}/{number}"
            for number, (domain, label) in enumerate(zip(domains.tolist(), labels.tolist()))
        ),
        labels=labels,
        domains=domains,
        class_names=ROTATED_MNIST.classes,
        domain_names=ROTATED_MNIST.domains,
        images=as_rgb(grey),
    )
    compare_counts(ROTATED_MNIST, table)
    return table


ROTATED_MNIST = register_data_set(
    DataSet(
        name="rotated_mnist",
        summary="Rotated MNIST (Ghifary et al. 2015, as in DomainBed): digits turned by 0 to 75 "
        "degrees",
        load=draw_rotated_mnist,
        preset={
            "data": {"image_size": 28},
            "clients": {"number": 5, "partition": "domain"},
            "model": {"backbone": "cnn", "weights": None},
            "train": {"rounds": 20, "batch_size": 64, "lr": 1e-3, "augmentation": "rotated_mnist"},
        },
        domains=tuple(f"angle_{angle}" for angle in ANGLES),
        augmentation=AugmentSettings(),  # what turns or shifts would blur the domains
        classes=tuple(str(digit) for digit in range(10)),
        counts={
            f"angle_{angle}": len(range(place, 70_000, len(ANGLES)))
            for place, angle in enumerate(ANGLES)
        },
        publication=Publication(
            citation="M. Ghifary, W. B. Kleijn, M. Zhang and D. Balduzzi, Domain Generalization "
            "for Object Recognition with Multi-task Autoencoders, ICCV 2015; digits: Y. LeCun, "
            "C. Cortes and C. J. C. Burges, The MNIST Database",
            address="http://yann.lecun.com/exdb/mnist/",
            files=tuple(
                PublishedFile(address=_STORE + name, name=name, checksum=f"md5:{md5}", unpack=False)
                for name, md5 in _MD5.items()
            ),
        ),
        layouts=(
            "`{train,t10k}-{images-idx3,labels-idx1}-ubyte`, each as it is or `.gz`, in the root, "
            "`raw/` or `MNIST/raw/`",
        ),
        protocol="one angle held out (DomainBed, FedSR)",
    )
)
