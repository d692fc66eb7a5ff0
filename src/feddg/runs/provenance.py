"""Checks that a run's experiment, images and files have not changed since it began."""

from collections.abc import Callable
from pathlib import Path

from feddg.data.data_set import load_images_of
from feddg.data.fingerprint import Difference, ImagesFile, difference, images_file
from feddg.errors import RunError
from feddg.experiment import Experiment
from feddg.runs.folder import CHECKPOINTS, NEWEST
from feddg.runs.prepare import named_files
from feddg.runs.reading import DEPLOYMENT, EXPERIMENT
from feddg.settings import DataSettings
from feddg.storage import cache_folder, is_file
from feddg.text import command

IMAGES = "images.json"


class ImagesNow:
    """Returns the present images of experiments; each data set is read once.

    Args:
        cache: folder that stores the hashes.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._known: dict[str, tuple[ImagesFile, str]] = {}

    def __call__(self, experiment: Experiment) -> ImagesFile:
        """Returns the images without decoding them.

        Raises:
            DataError: they cannot be listed.
        """
        images, _ = self._images(experiment.data)
        return images.model_copy(update={"files": named_files(experiment)})

    def fingerprint(self, experiment: Experiment) -> str:
        """Returns the hash of the images; see :meth:`ImagesFile.fingerprint`.

        Raises:
            DataError: they cannot be listed.
        """
        return self._images(experiment.data)[1]

    def _images(self, data: DataSettings) -> tuple[ImagesFile, str]:
        key = repr((data.source, data.root, data.all_options, data.leave_out, data.group_by))
        if key not in self._known:
            table = load_images_of(data)
            images = images_file(table, self._cache)
            self._known[key] = images, images.fingerprint()
        return self._known[key]


def find_folder(
    experiment: Experiment,
    out: Path | str,
    now: Callable[[Experiment], ImagesFile],
    *,
    again: bool = False,
) -> Path:
    """Returns the run folder for an experiment with the present images.

    That is ``out / experiment.label``, with ``.2``, ``.3``, ... for runs that were repeated beside
    it.

    Args:
        experiment: the experiment.
        out: parent of the run folder.
        now: gives the present images; not called if there is nothing to compare.
        again: whether to start a new run beside runs whose images have changed.

    Raises:
        RunError: the images have changed since the run began, and ``again`` is False.
        DataError: the images cannot be listed.
    """
    first = Path(out) / experiment.label
    folders = [first]
    while (later := _numbered(first, len(folders) + 1)).is_dir():
        folders.append(later)
    begun_folders = [folder for folder in folders if has_begun(folder)]
    if not begun_folders:
        return folders[-1]
    images = now(experiment)
    for folder in reversed(begun_folders):
        if not _changes(folder, images):
            return folder
    if not has_begun(folders[-1]):
        return folders[-1]  # somebody wanted to start anew before
    if again:
        return _numbered(first, len(folders) + 1)
    changes = _changes(folders[-1], images)
    raise RunError(
        f"{changes.what} changed since {folders[-1]} began: {changes}; "
        "--again starts anew beside it"
    )


def check_images(folder: Path, experiment: Experiment, cache: Path | None = None) -> None:
    """Checks that a run's images have not changed.

    Args:
        folder: the run's folder.
        experiment: the run's experiment.
        cache: where image hashes are stored; the user's cache by default.

    Raises:
        RunError: they have changed; the message says how. Or they are at a deployment's sites.
    """
    if is_file(folder / DEPLOYMENT):
        raise RunError(
            f"{folder} is a deployment's run, whose images are at the sites: nothing can be "
            "measured on them here"
        )
    if not has_begun(folder):
        return
    changes = _changes(folder, ImagesNow(cache_folder(cache))(experiment))
    if changes:
        out = ("--out", str(folder.parent))
        raise RunError(
            f"{changes.what} changed since {folder} began: {changes}; put them back, or start anew "
            f"beside it: `{command('run', str(folder / EXPERIMENT), *out, '--again')}`"
        )


def has_begun(folder: Path) -> bool:
    """Whether a run has results that depend on its images."""
    return (folder / CHECKPOINTS / NEWEST).is_file()


def _numbered(first: Path, number: int) -> Path:
    return first.with_name(f"{first.name}.{number}")


def _changes(folder: Path, now: ImagesFile) -> Difference:
    """Returns what has changed; a deployment's run has no record of its images."""
    before = ImagesFile.read(folder / IMAGES)
    return Difference() if before is None else difference(before, now)


def depths_of_run(folder: Path) -> tuple[int, ...]:
    """Returns the bit depths that the domains of a run use, ascending; none if all have 8 bits.

    Raises:
        RunError: the file is damaged.
    """
    images = ImagesFile.read(folder / IMAGES)
    return () if images is None else images.bit_depths
