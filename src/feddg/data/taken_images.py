"""Images taken out of a data set that holds their bytes, kept in the cache as files."""

import hashlib
import io
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from PIL import Image

from feddg.errors import DataError
from feddg.storage import FILE_MODE, cache_folder, private_folder, read_text, replace_text, why

LISTING = ".paths.json"
_SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "TIFF": ".tif", "BMP": ".bmp"} | {
    "GIF": ".gif",
    "JPEG2000": ".jp2",
    "AVIF": ".avif",
}


def taken_images(
    key: Sequence[str], contents: Callable[[], Iterable[tuple[str, bytes]]]
) -> tuple[Path, list[str]]:
    """Returns a folder with images as files, made once.

    Args:
        key: what the images are; another key is another folder.
        contents: gives the name of each image, without an ending, and the bytes of its file.

    Returns:
        The folder, and the path of each image below it.

    Raises:
        DataError: the cache cannot be written, or whatever ``contents`` raises.
    """
    name = hashlib.blake2b(json.dumps(list(key)).encode(), digest_size=16).hexdigest()
    folder = cache_folder() / f"taken-{name}"
    if not (folder / LISTING).is_file():
        aside = cache_folder() / f"partial-{uuid.uuid4().hex}"
        try:
            private_folder(aside)
            paths = [_write(aside, name, content) for name, content in contents()]
            replace_text(aside / LISTING, json.dumps(paths))
            if not folder.is_dir():
                aside.rename(folder)
        except OSError as error:
            raise DataError(f"Cannot write images to {folder}: {why(error)}.") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    try:
        return folder, [str(path) for path in json.loads(read_text(folder / LISTING, DataError))]
    except ValueError:
        raise DataError(f"{folder} is damaged. Delete that folder and try again.") from None


def _write(folder: Path, name: str, content: bytes) -> str:
    path = f"{name}{_suffix(content)}"
    private_folder((folder / path).parent)
    (folder / path).write_bytes(content)
    (folder / path).chmod(FILE_MODE)
    return path


def _suffix(content: bytes) -> str:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return _SUFFIXES.get(str(image.format), ".png")
    except Exception:  # decoding says what is wrong with it
        return ".png"
