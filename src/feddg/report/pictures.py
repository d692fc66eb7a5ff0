"""Pictures as part of the page, small enough to travel with it."""

import base64
import io
from pathlib import Path

from PIL import Image, UnidentifiedImageError, features

from feddg.data.images import FORMATS
from feddg.storage import open_file

SMALL_ENOUGH = 100_000
WIDEST = 1600
QUALITY = 82


def data_uri(path: Path) -> tuple[str, int, int] | None:
    """A picture file as a ``data:`` address with its width and height in pixels.

    A large file is scaled to ``WIDEST`` pixels and stored as WebP where that is smaller.

    Returns:
        None when the file is not a readable picture: a report is not the place to fail for it.
    """
    try:
        with open_file(path) as file:
            content = file.read()
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            picture.load()
            width, height = picture.size
            kind = Image.MIME.get(picture.format or "", "image/png")
            smaller = _compressed(picture) if len(content) > SMALL_ENOUGH else None
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError):
        return None
    if smaller is not None and len(smaller) < len(content):
        content, kind = smaller, "image/webp"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}", width, height


def _compressed(picture: Image.Image) -> bytes | None:
    if not features.check("webp"):
        return None
    colours = picture.convert("RGBA" if "A" in picture.getbands() else "RGB")
    colours.thumbnail((WIDEST, 8 * WIDEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    colours.save(buffer, "WEBP", quality=QUALITY, method=5)
    return buffer.getvalue()
