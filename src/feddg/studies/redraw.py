"""Re-draws image files in the style of another image, or of a folder of images."""

from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor

from feddg.data.decoding import UnusableImageError, decode_image, quiet_pillow
from feddg.data.images import IMAGE_SUFFIXES
from feddg.errors import DataError
from feddg.files import entries, is_file, replace_file, why
from feddg.styles.codec import load_codec, transfer
from feddg.styles.interpolate import client_style
from feddg.styles.statistics import measure


def redraw_files(
    images: Path,
    style: Path,
    out: Path,
    strength: float,
    size: int,
    *,
    codec: str = "compact",
    encoder: Path | None = None,
    decoder: Path | None = None,
) -> list[Path]:
    """Re-draws images and writes them as PNG files of the same names.

    Args:
        images: an image file, or a folder of images.
        style: an image file, or a folder whose pooled style is taken.
        out: folder for the results; made if absent.
        strength: AdaIN blend in [0, 1].
        size: side of the square results, pixels.
        codec: see :func:`feddg.styles.codec.load_codec`.
        encoder: the codec's encoder weights, or None for its own.
        decoder: the codec's decoder weights, or None for its own.

    Returns:
        The files written.

    Raises:
        DataError: there is no usable image.
    """
    chosen = load_codec(codec, encoder=encoder, decoder=decoder)
    files, contents = _decoded(images, size)
    _, examples = _decoded(style, size)
    together = torch.zeros(len(examples), dtype=torch.int64)
    target = client_style(measure(chosen, examples), together)
    redrawn = transfer(chosen, contents, target.float(), strength)
    written = [out / f"{file.stem}.png" for file in files]
    try:
        for path, image in zip(written, redrawn):
            _write_png(path, Image.fromarray(image.permute(1, 2, 0).numpy()))
    except OSError as error:
        raise DataError(f"Cannot write into {out}: {why(error)}.") from None
    return written


def _write_png(path: Path, image: Image.Image) -> None:
    replace_file(path, lambda aside: image.save(aside, "PNG"))


def _decoded(path: Path, size: int) -> tuple[list[Path], Tensor]:
    """Returns the image files at ``path`` and their pixels, uint8 ``(N, 3, size, size)``."""
    files = _image_files(path)
    if not files:
        raise DataError(
            f"there is no image in {path}; known endings: {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    with quiet_pillow():
        pixels = [torch.from_numpy(_decode(file, size)) for file in files]
    return files, torch.stack(pixels).permute(0, 3, 1, 2).contiguous()


def _image_files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = [path / entry.name for entry in entries(path, DataError)]
    elif is_file(path, DataError):
        inside = [path]
    else:
        raise DataError(f"{path} does not exist; name an image or a folder of images")
    return [file for file in inside if file.suffix.lower() in IMAGE_SUFFIXES]


def _decode(file: Path, size: int) -> numpy.ndarray:
    try:
        return decode_image(file, size, "squash")
    except UnusableImageError as error:
        raise DataError(f"{file} cannot be used: {error}") from None
