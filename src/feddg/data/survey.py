"""A look at some images of every domain: how they are stored, before they become 8-bit colours."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import UnidentifiedImageError

from feddg.data.bands import Reading, Samples, bits_used, is_deep, read_samples, read_tiff
from feddg.data.decoding import MOST_PIXELS, quiet_pillow
from feddg.data.image_formats import open_image
from feddg.data.images import ImageTable
from feddg.data.remarks import Remark
from feddg.data.tiles import Tile

SAMPLE = 24
"""Images of a domain that are looked at for their depth."""

_MAYBE_DEEP = (".tif", ".tiff", ".png", ".jp2", ".j2k")
_SEE_THROUGH = 0.5
"""Share of half-transparent pixels from which on a fourth band is hardly transparency."""


@dataclass(frozen=True)
class Survey:
    """How the images of each domain are stored, by a look at some of them.

    Attributes:
        depths: bits that the values of files deeper than 8 bits use, by domain.
        veiled: for domains whose transparency is hardly one, a file that shows it.
    """

    depths: Mapping[str, int]
    veiled: Mapping[str, str]


def survey(table: ImageTable) -> Survey:
    """Looks at up to ``SAMPLE`` images of each domain, evenly spaced; nothing is kept of them."""
    assert table.root is not None
    root, depths, veiled = table.root, dict[str, int](), dict[str, str]()
    for domain, files in files_by_domain(table).items():
        candidates = [file for file in files if file.lower().endswith(_MAYBE_DEEP)]
        chosen = evenly(candidates, SAMPLE)
        with quiet_pillow(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            looks = list(pool.map(lambda file: _look(root / file), chosen))
        found = [bits for bits, _ in looks if bits]
        if found:
            depths[domain] = max(found)
        doubtful = [file for file, (_, veil) in zip(chosen, looks) if veil]
        if doubtful:
            veiled[domain] = doubtful[0]
    return Survey(depths, veiled)


def depth_of(files: Iterable[Path]) -> int:
    """Returns the bits that files' values use, by a look at ``SAMPLE`` of those that may be deep.

    They are taken for one domain, as those that are predicted together are; of more files than can
    be listed at once, the sample is the first ones and then ever fewer. 0 where all are of 8 bits.
    """
    chosen: list[Path] = []
    step = 1
    for place, file in enumerate(f for f in files if f.suffix.lower() in _MAYBE_DEEP):
        if place % step == 0:
            chosen.append(file)
        if len(chosen) > 2 * SAMPLE:  # evenly spaced still, in constant memory
            chosen, step = chosen[::2], 2 * step
    with quiet_pillow(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return max(pool.map(lambda file: _look(file)[0], chosen), default=0)


def about_survey(found: Survey, reading: Reading) -> Iterator[Remark]:
    """Says what depths were found, and where a band of light is likely taken for transparency."""
    if reading.range == "auto":
        for domain, bits in found.depths.items():
            yield Remark("note", f"domain '{domain}' uses {bits} bits: white is {2**bits - 1}")
        if len(set(found.depths.values())) > 1:
            depths = ", ".join(f"{domain} {bits}" for domain, bits in found.depths.items())
            yield Remark("warning", f"the bit depths of domains differ ({depths})")
    if reading.bands:
        return
    for domain, file in found.veiled.items():
        yield Remark(
            "warning",
            f"images of domain '{domain}' are mostly half transparent ({file}): if the fourth band "
            "is near infrared, set data.bands: [1, 2, 3], or they turn white",
        )


def files_by_domain(table: ImageTable) -> dict[str, list[str]]:
    """Returns the distinct files of each domain, in the table's order."""
    found: dict[str, dict[str, None]] = {name: {} for name in table.domain_names}
    for path, domain in zip(table.paths, table.domains.tolist()):
        found[table.domain_names[domain]][Tile.named(path).file] = None
    return {domain: list(files) for domain, files in found.items()}


def evenly(items: Sequence[str], count: int) -> list[str]:
    """Returns at most ``count`` items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[place * len(items) // count] for place in range(count)]


def _look(file: Path) -> tuple[int, bool]:
    """The depth of a file, 0 for one of 8 bits or without one; and whether it seems veiled."""
    try:
        samples = samples_of(file, deep_only=True)
    except Exception:  # decoding says what is wrong with it
        return 0, False
    if samples is None:
        return 0, False
    values = samples.values
    veil = samples.alpha and _half_transparent(values[:, :, -1])
    colours = values[:, :, :-1] if samples.alpha else values
    return (0 if values.dtype == np.uint8 else bits_used(colours)), veil


def samples_of(path: Path, *, deep_only: bool = False) -> Samples | None:
    """Returns the numbers of a file; None for one that is too large to look at.

    Args:
        path: the file.
        deep_only: whether to leave out files of 8 bits without transparency.

    Raises:
        Exception: it cannot be decoded.
    """
    try:
        with open_image(path) as image:
            if image.size[0] * image.size[1] > MOST_PIXELS:
                return None
            if deep_only and not is_deep(image) and image.mode not in ("LA", "RGBA"):
                return None
            return read_samples(path, image)
    except UnidentifiedImageError:
        return read_tiff(path)


def _half_transparent(alpha: np.ndarray) -> bool:
    most = 255 if alpha.dtype == np.uint8 else 2**16 - 1
    return bool(((alpha > 0) & (alpha < most)).mean() > _SEE_THROUGH)
