"""Bodies that nobody sends in good faith, and what each must be told."""

import io
import struct
import zlib
from dataclasses import dataclass

import numpy
from PIL import Image

BOUNDARY = "aaaabbbbccccdddd"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


@dataclass(frozen=True)
class Upload:
    """A body, and the statuses that answer it."""

    name: str
    body: bytes
    statuses: tuple[int, ...]
    content_type: str = CONTENT_TYPE


def multipart(*files: tuple[str, bytes]) -> bytes:
    """A body by hand: libraries would not write these file names."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n".encode()
        + content
        + b"\r\n"
        for name, content in files
    ]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def png(side: int = 32, seed: int = 0) -> bytes:
    """An honest image."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (side, side, 3), numpy.uint8)
    stored = io.BytesIO()
    Image.fromarray(pixels).save(stored, "PNG")
    return stored.getvalue()


def enormous_png(width: int = 40_000, height: int = 40_000) -> bytes:
    """A whole PNG of one colour: 200 MB of pixels in 200 kB."""
    lines = bytes((1 + (width + 7) // 8) * 100)
    packer = zlib.compressobj(9, wbits=-15)  # no head: a part that is flushed may be repeated
    part = packer.compress(lines) + packer.flush(zlib.Z_FULL_FLUSH)
    parts = height // 100
    checksum = (len(lines) * parts % 65_521) << 16 | 1  # Adler-32 of zeros
    rows = b"\x78\xda" + part * parts + packer.flush() + struct.pack(">I", checksum)

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def hostile_uploads() -> list[Upload]:
    """One of each kind, but for the body of 500 MB, which no test holds in memory."""
    good = png()
    return [
        Upload("not an image", multipart(("a.png", b"MZ" + bytes(5000))), (415,)),
        Upload("text", multipart(("a.png", b"hello")), (415,)),
        Upload("empty file", multipart(("a.png", b"")), (422,)),
        Upload("40,000 x 40,000 pixels", multipart(("a.png", enormous_png())), (413,)),
        Upload("truncated", multipart(("a.png", png(256)[:30_000])), (422,)),
        Upload("no name", multipart(("", good)), (400,)),
        Upload("too many files", multipart(*((f"{i}.png", good) for i in range(40))), (400,)),
        Upload("no multipart", good, (415,), "image/png"),
        Upload("no boundary", good, (400,), "multipart/form-data"),
        Upload("garbage", b"garbage", (400,)),
        Upload("cut off", multipart(("a.png", good))[:-40], (400, 422)),
        Upload("a field", multipart().replace(b"--\r\n", _FIELD), (400,)),
        Upload("PostScript", multipart(("a.png", b"%!PS-Adobe-3.0 EPSF-3.0\n")), (415,)),
        Upload("SVG", multipart(("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>")), (415,)),
    ]


_FIELD = (
    f'\r\nContent-Disposition: form-data; name="images"\r\n\r\n/etc/passwd\r\n--{BOUNDARY}--\r\n'
).encode()
