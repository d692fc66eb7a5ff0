"""The images in a request: read into memory within limits, and never laid down on a disk."""

import asyncio
from collections.abc import AsyncGenerator
from http import HTTPStatus

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from feddg.data.images import ImageBytes
from feddg.serving.faults import RequestFault
from feddg.serving.limits import ServeLimits

LONGEST_NAME = 255
HOW = "send multipart/form-data with one or several files, as `curl -F images=@image.png` does"


class _InMemory(MultiPartParser):
    """Starlette's parser; it would lay files of more than a megabyte down on disk."""

    spool_max_size = 2**62

    def close(self) -> None:
        """Frees what was received, whole or not."""
        for file in self._files_to_close_on_error:
            file.close()


def refuse_large(request: Request, limits: ServeLimits) -> None:
    """Refuses a body that says it is too large, before any of it is read.

    Raises:
        RequestFault: it is.
    """
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or int(said[:20]) > limits.request_bytes:
        raise _too_large(limits)


async def read_uploads(request: Request, limits: ServeLimits) -> list[ImageBytes]:
    """Returns the files of a request.

    Raises:
        RequestFault: it holds none, too many, or something else; it is too large, or too slow.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RequestFault(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, HOW)
    parser = _InMemory(
        request.headers, _within(request, limits), max_files=limits.images, max_fields=limits.images
    )
    try:
        async with asyncio.timeout(limits.seconds):
            form = await parser.parse()
        return [await _image(field, value) for field, value in form.multi_items()] or _none()
    except TimeoutError:
        raise RequestFault(
            HTTPStatus.REQUEST_TIMEOUT, f"the images did not arrive within {limits.seconds:g} s"
        ) from None
    except MultiPartException as error:
        raise RequestFault(HTTPStatus.BAD_REQUEST, f"{error.message} {HOW}") from None
    except (ClientDisconnect, ValueError, KeyError):
        raise RequestFault(HTTPStatus.BAD_REQUEST, f"the request is damaged; {HOW}") from None
    finally:
        parser.close()


async def _image(field: str, value: UploadFile | str) -> ImageBytes:
    if isinstance(value, str):
        shown = "".join(c for c in field[:40] if c.isprintable())
        raise RequestFault(HTTPStatus.BAD_REQUEST, f"the field {shown!r} is no file; {HOW}")
    name = value.filename or ""
    plain = name.isprintable() and not set(name) & set("/\\:")
    if not plain or name in ("", ".", "..") or len(name) > LONGEST_NAME:
        raise RequestFault(
            HTTPStatus.BAD_REQUEST,
            "a file's name must be a plain name: no path, no control characters, at most "
            f"{LONGEST_NAME} characters",
        )
    return ImageBytes(name, await value.read())


def _none() -> list[ImageBytes]:
    raise RequestFault(HTTPStatus.BAD_REQUEST, f"there is no file in the request; {HOW}")


async def _within(request: Request, limits: ServeLimits) -> AsyncGenerator[bytes, None]:
    """The body, as long as it is not too large; the rest is not read."""
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limits.request_bytes:
            raise _too_large(limits)
        yield chunk


def _too_large(limits: ServeLimits) -> RequestFault:
    return RequestFault(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"a request may have {limits.request_megabytes:g} MB; send fewer or smaller images",
    )
