"""Cases of damage: what is wrong, and what is said of it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from feddg.api import run
from feddg.experiment import Experiment

ROUNDS, SIZE = 3, 8


@dataclass(frozen=True)
class Original:
    """A finished run with its images and caches, to be copied and damaged."""

    images: Path
    cache: Path
    folder: Path

    @classmethod
    def made(cls, root: Path) -> "Original":
        """Trains for a second."""
        images = draw_images(root / "images")
        experiment = Experiment(
            data={"root": images, "image_size": SIZE, "id_val": 0, "id_test": 0},
            hold_out="c",
            method="scaffold",  # its clients remember something
            clients=2,
            model={"backbone": "cnn", "weights": None},
            train={"rounds": ROUNDS, "local_steps": 1, "batch_size": 4},
            evaluate={"every": ROUNDS},
            device="cpu",
        )
        done = run(experiment, root / "runs", cache=root / "cache", report=False)
        return cls(images, root / "cache", done.folder)


class Place:
    """Where one case is played: copies of the original, made when they are asked for."""

    def __init__(self, root: Path, original: Original) -> None:
        self.root, self.original, self.cache = root, original, original.cache

    @property
    def finished(self) -> Path:
        """A copy of the finished run."""
        folder = self.root / "runs" / self.original.folder.name
        if not folder.exists():
            shutil.copytree(self.original.folder, folder)
        return folder

    @property
    def run(self) -> Path:
        """A copy of the run without its end."""
        (self.finished / "summary.json").unlink(missing_ok=True)
        return self.finished

    @property
    def images(self) -> Path:
        """A copy of the images."""
        folder = self.root / "images"
        if not folder.exists():
            shutil.copytree(self.original.images, folder)
        return folder

    def file(self, name: str, content: str | bytes) -> Path:
        """A file with some content."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        family: heading in the table.
        what: what is wrong.
        play: does the damage and uses what is damaged; checks a recovery.
        error: pattern of the one error line; None where it recovers.
        said: pattern of the line that tells of a recovery; None where there is nothing to tell.
    """

    family: str
    what: str
    play: Callable[[Place], Any]
    error: str | None = None
    said: str | None = None


def draw_images(root: Path) -> Path:
    """Draws three domains of two classes, four images of each."""
    rng = numpy.random.default_rng(0)
    for domain in "abc":
        for label in ("cat", "dog"):
            (root / domain / label).mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 256, (SIZE, SIZE, 3), numpy.uint8)
                Image.fromarray(pixels).save(root / domain / label / f"{number}.png")
    return root
