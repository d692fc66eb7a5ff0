"""Transfers image files to the style of another image, or of a folder of images.

python benchmarks/codec/stylize.py PHOTOS --style PAINTINGS --out FOLDER [--strength 0.5]
[--size 128] [--codec compact] [--encoder FILE] [--decoder FILE]
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from feddg.data.decoding import UnusableImageError, decode_image, quiet_pillow
from feddg.data.images import IMAGE_SUFFIXES, endings, open_image
from feddg.errors import DataError, FeddgError
from feddg.storage import entries, is_file, replace_file, why
from feddg.styles.codec import load_codec, transfer
from feddg.styles.statistics import client_style, measure

LEAST_SIDE = 16
"""Smallest side in pixels; a narrower strip is enlarged, as a codec's maps need this much."""


@dataclass(frozen=True)
class StylizedFiles:
    """The result of stylizing image files.

    Attributes:
        written: paths of the files written.
        skipped: image and style files that could not be used, each with the reason.
    """

    written: Sequence[Path]
    skipped: Sequence[tuple[Path, str]]


def stylize_files(
    images: Path,
    style: Path,
    out: Path,
    strength: float = 1.0,
    size: int = 128,
    *,
    codec: str = "compact",
    encoder: Path | None = None,
    decoder: Path | None = None,
) -> StylizedFiles:
    """Stylizes images and writes them as PNG files with the same names and folders.

    Images keep their aspect ratio. A file that cannot be used is skipped and named in the result.

    Args:
        images: an image file, or a folder with images at any depth.
        style: an image file, or a folder with images at any depth, whose pooled style is used.
        out: folder for the results; created if missing.
        strength: AdaIN blend in [0, 1].
        size: longer side of the results in pixels.
        codec: see :func:`feddg.styles.codec.load_codec`.
        encoder: the codec's encoder weights, or None for its own.
        decoder: the codec's decoder weights, or None for its own.

    Returns:
        The files written and those left out.

    Raises:
        DataError: there is no usable image, or no usable style.
    """
    chosen = load_codec(codec, encoder=encoder, decoder=decoder)
    skipped: list[tuple[Path, str]] = []
    with quiet_pillow():
        examples = [_square(pixels) for _, pixels in _decoded(_files(style), size, skipped)]
        if not examples:
            raise DataError(f"no image in {style} can be used as a style: {_first(skipped)}")
        together = torch.zeros(len(examples), dtype=torch.int64)
        target = client_style(measure(chosen, torch.stack(examples)), together).float()
        files = _files(images, leave_out=out)
        names = _names(files, images, out)
        written = []
        for file, pixels in _decoded(files, size, skipped):
            stylized = transfer(chosen, pixels[None], target, strength)[0]
            _write(names[file], Image.fromarray(stylized.permute(1, 2, 0).numpy()))
            written.append(names[file])
    if not written:
        raise DataError(f"no image in {images} can be used: {_first(skipped)}")
    return StylizedFiles(written, skipped)


def _write(path: Path, image: Image.Image) -> None:
    try:
        replace_file(path, lambda aside: image.save(aside, "PNG"))
    except OSError as error:
        raise DataError(f"Cannot write {path}: {why(error)}.") from None


def _first(skipped: Sequence[tuple[Path, str]]) -> str:
    path, reason = skipped[-1]
    return f"{path}: {reason}"


def _files(path: Path, leave_out: Path | None = None) -> list[Path]:
    """Returns the image files at ``path``, at any depth, without those in ``leave_out``."""
    own = leave_out.resolve() if leave_out is not None else None
    if path.is_dir():
        entries(path, DataError)  # says so where it cannot be read
        found = sorted(path.rglob("*"))
    elif is_file(path, DataError):
        found = [path]
    else:
        raise DataError(f"{path} does not exist; name an image or a folder of images")
    files = [
        file
        for file in found
        if file.suffix.lower() in IMAGE_SUFFIXES
        and not file.is_dir()
        and own not in file.resolve().parents
    ]
    if not files:
        raise DataError(f"there is no image in {path}; known endings: {endings()}")
    return files


def _names(files: Sequence[Path], images: Path, out: Path) -> dict[Path, Path]:
    """Returns the output path of each file; no two are the same."""
    top = images if images.is_dir() else images.parent
    places = {file: out / file.relative_to(top).with_suffix(".png") for file in files}
    often = Counter(places.values())
    return {
        file: place if often[place] == 1 else place.with_name(f"{file.name}.png")
        for file, place in places.items()
    }


def _decoded(
    files: Sequence[Path], size: int, skipped: list[tuple[Path, str]]
) -> Iterator[tuple[Path, Tensor]]:
    """Yields files with their pixels, uint8 ``(3, H, W)``, longer side ``size``."""
    for file in files:
        try:
            pixels = torch.from_numpy(decode_image(file, size, "pad"))
            with open_image(file) as image:
                assert image is not None  # as what could be decoded without naming bands
                width, height = ImageOps.exif_transpose(image).size
        except (UnusableImageError, UnidentifiedImageError) as error:
            skipped.append((file, str(error)))
            continue
        scale = size / max(width, height)
        yield file, _unpadded(pixels, max(1, round(width * scale)), max(1, round(height * scale)))


def _unpadded(pixels: Tensor, width: int, height: int) -> Tensor:
    """Cuts off the padding that made ``(size, size, 3)`` pixels square."""
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    cut = pixels[top : top + height, left : left + width].permute(2, 0, 1).contiguous()
    least = (max(height, LEAST_SIDE), max(width, LEAST_SIDE))
    return cut if least == (height, width) else _resized(cut, *least)


def _square(pixels: Tensor) -> Tensor:
    """Resizes pixels to a square; style statistics hardly depend on an image's shape."""
    side = max(pixels.shape[1:])
    return _resized(pixels, side, side)


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    wanted = torch.nn.functional.interpolate(
        pixels[None].float(), (height, width), mode="bilinear", antialias=True
    )
    return wanted[0].round().clamp(0, 255).to(torch.uint8)


def main(words: Sequence[str] | None = None) -> None:
    """Stylizes what the command line names."""
    parser = argparse.ArgumentParser(description="Stylize images in the style of others.")
    parser.add_argument("images", type=Path, help="an image or a folder of images")
    parser.add_argument("--style", type=Path, required=True, help="an image, or a folder to pool")
    parser.add_argument("--out", type=Path, required=True, help="folder for the stylized images")
    parser.add_argument("--strength", type=float, default=1.0, help="AdaIN blend, 0 to 1")
    parser.add_argument("--size", type=int, default=128, help="longer side of the results, pixels")
    parser.add_argument("--codec", default="compact", help="compact, modulated, vgg19 or colors")
    parser.add_argument("--encoder", type=Path, help="encoder weights")
    parser.add_argument("--decoder", type=Path, help="decoder weights")
    try:
        done = stylize_files(**vars(parser.parse_args(words)))
    except FeddgError as error:
        sys.exit(f"error: {error}")
    for path, reason in done.skipped:
        print(f"left out: {path}: {reason}", file=sys.stderr)
    print(f"{len(done.written)} images written")


if __name__ == "__main__":
    main()
