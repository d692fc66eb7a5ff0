"""The web application: ``/predict``, ``/health``, ``/model``, and a page for people."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import numpy
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

import feddg
from feddg.clients.threads import available_cores
from feddg.data.decoding import (
    MOST_PIXELS,
    OversizedImageError,
    UnknownFormatError,
    UnusableImageError,
    names_in,
    quiet_pillow,
)
from feddg.data.images import IMAGE_SUFFIXES, ImageBytes
from feddg.diagnostics import Diagnostic
from feddg.errors import MissingPackage
from feddg.methods.base import title_of
from feddg.prediction.classifier import ImageClassifier
from feddg.prediction.model_file import ModelDescription
from feddg.prediction.predict import BatchPredictor, Prediction, rounded
from feddg.report.blocks import template_named
from feddg.settings import Settings
from feddg.text import printable

log = logging.getLogger("feddg")

LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


class ServeLimits(Settings):
    """Limits on one request, and on requests at once.

    They bound memory: at most ``at_once`` bodies of ``request_megabytes``, and one image of
    ``megapixels`` per decoding thread.
    """

    request_megabytes: float = Field(32.0, gt=0, le=4096, description="largest size of a request")
    images: int = Field(32, ge=1, le=1024, description="most images in one request")
    megapixels: float = Field(
        50.0, gt=0, le=MOST_PIXELS / 1e6, description="most pixels of an image, in millions"
    )
    at_once: int = Field(8, ge=1, le=256, description="number of requests answered at once")
    waiting: int = Field(256, ge=0, le=10_000, description="number of requests that may wait")
    seconds: float = Field(60.0, gt=0, le=3600, description="time a body may take to arrive")

    @property
    def request_bytes(self) -> int:
        """Largest body in bytes."""
        return int(self.request_megabytes * 2**20)


# Which requests come in at all, and what every answer carries.
#
# A page on another web site can have its visitor's browser send requests to this machine, and with
# a name that it points here (DNS rebinding) read the answers, too. Therefore a request must name a
# host that this server is known by, and a browser must say that it comes from the server's own
# page.


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


def _split(address: str) -> SplitResult:
    """Returns the parts of an address; empty parts if it is invalid."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def refusal_of(method: str, headers: Headers, hosts: Collection[str]) -> JSONResponse | None:
    """Returns the answer to a request that is not meant for this server, or None.

    Args:
        method: HTTP method.
        headers: headers of the request.
        hosts: names by which the server is reached, without ports, in lower case.
    """
    named = headers.getlist("host")
    if len(named) != 1 or _split(f"//{named[0]}").hostname not in hosts:
        fault = "this server does not answer to that name; its operator can add it with --known-as"
        return JSONResponse({"detail": fault}, HTTPStatus.MISDIRECTED_REQUEST)
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    foreign = origin is not None and _split(origin).netloc.lower() != named[0].lower()
    reads = method in ("GET", "HEAD")
    if not reads and (foreign or site not in ("same-origin", "none")):
        fault = "requests from pages of other web sites are refused"
        return JSONResponse({"detail": fault}, HTTPStatus.FORBIDDEN)
    return None


# The images in a request: read into memory within limits, and never laid down on a disk.


LONGEST_NAME = 255
"""How much of a file's name is given back; its end tells the format."""
HOW = "send multipart/form-data with one or several files, as `curl -F images=@image.png` does"


class _InMemory(MultiPartParser):
    """Starlette's parser, without writing files of more than a megabyte to disk."""

    spool_max_size = 2**62

    def close(self) -> None:
        """Frees what was received, complete or not."""
        for file in self._files_to_close_on_error:
            file.close()


async def read_uploads(request: Request, limits: ServeLimits) -> list[ImageBytes]:
    """Returns the files of a request.

    Raises:
        HTTPException: there are no files, too many, or other fields; or the request is too large or
            too slow.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, HOW)
    parser = _InMemory(
        request.headers, _within(request, limits), max_files=limits.images, max_fields=limits.images
    )
    try:
        async with asyncio.timeout(limits.seconds):
            form = await parser.parse()
        images = [await _image(field, value) for field, value in form.multi_items()]
    except TimeoutError:
        raise HTTPException(
            HTTPStatus.REQUEST_TIMEOUT, f"the images did not arrive within {limits.seconds:g} s"
        ) from None
    except MultiPartException as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"{error.message} {HOW}") from None
    except (ClientDisconnect, ValueError, KeyError):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"the request is damaged; {HOW}") from None
    finally:
        parser.close()
    if not images:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"there is no file in the request; {HOW}")
    return images


async def _image(field: str, value: UploadFile | str) -> ImageBytes:
    if isinstance(value, str):
        shown = "".join(c for c in field[:40] if c.isprintable())
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"the field {shown!r} is not a file; {HOW}")
    if not value.filename:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"a file has no name; {HOW}")
    return ImageBytes(printable(value.filename[-LONGEST_NAME:]), await value.read())


async def _within(request: Request, limits: ServeLimits) -> AsyncGenerator[bytes, None]:
    """Yields the body until it is too large; the rest is not read."""
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limits.request_bytes:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a request may have {limits.request_megabytes:g} MB; send fewer or smaller images",
            )
        yield chunk


# From uploaded files to answers: decoded side by side, predicted request by request.


MOST_DECODERS = 4
MOST_TOGETHER = 64
"""Most images in one forward pass."""
FAILED = "the model failed on these images; the server's log says why"

Answered = tuple[Prediction, HTTPStatus]
"""The prediction for one uploaded file, and its HTTP status if it were the only file."""


class Answerer:
    """Answers requests with uploaded files, in one event loop.

    A few requests are processed, some wait with their body unread, and further ones are refused.
    One thread runs the model, for one request after the other.

    Args:
        classifier: the model; its predictions must not depend on earlier images.
        limits: limits on requests.
    """

    def __init__(self, classifier: ImageClassifier, limits: ServeLimits) -> None:
        self._predictor, self._limits = BatchPredictor(classifier, 0, MOST_TOGETHER), limits
        self._free, self._taken_in = asyncio.Semaphore(limits.at_once), 0
        decoders = min(MOST_DECODERS, available_cores())
        self._decoders = ThreadPoolExecutor(decoders, thread_name_prefix="decode")
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def __call__(self, request: Request) -> list[Answered]:
        """Returns the answer for each file.

        Raises:
            HTTPException: the request cannot be used, too many wait, or the model failed.
        """
        if self._taken_in >= self._limits.at_once + self._limits.waiting:
            raise HTTPException(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "too many requests are waiting; try again later",
                {"Retry-After": "5"},
            )
        self._taken_in += 1
        try:
            async with self._free:
                return await self._answers(await read_uploads(request, self._limits))
        finally:
            self._taken_in -= 1

    def close(self) -> None:
        """Stops the threads."""
        self._decoders.shutdown(cancel_futures=True)
        self._model.shutdown(cancel_futures=True)

    async def _answers(self, images: Sequence[ImageBytes]) -> list[Answered]:
        loop = asyncio.get_running_loop()
        decoded = await asyncio.gather(
            *(loop.run_in_executor(self._decoders, self._decode, image) for image in images)
        )
        usable = [
            (image.name, pixels)
            for image, pixels in zip(images, decoded)
            if isinstance(pixels, numpy.ndarray)
        ]
        predictions = self._predictor.predictions(usable)  # made in the model's thread
        try:
            found = iter(await loop.run_in_executor(self._model, list, predictions))
        except Exception:  # out of memory, say
            log.exception("the model failed")
            raise HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR, FAILED) from None
        return [
            (next(found), HTTPStatus.OK) if isinstance(part, numpy.ndarray) else part
            for part in decoded
        ]

    def _decode(self, image: ImageBytes) -> numpy.ndarray | Answered:
        """Returns a file's pixels, or the answer that says why there are none."""
        about = self._predictor.classifier.description
        side, limit = about.tile, int(self._limits.megapixels * 1e6)
        try:
            if side is not None and len(names_in(image, image.name, side)) > 1:
                raise UnusableImageError(
                    f"the model was trained on tiles of {side} x {side} pixels: send tiles, or use "
                    "`feddg predict`, which cuts them"
                )
            return about.decode(image, limit)
        except OversizedImageError:
            reason = f"it has more than {limit / 1e6:g} million pixels, the limit here"
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        except UnknownFormatError as error:
            reason, status = str(error), HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        except (UnusableImageError, MissingPackage) as error:
            reason, status = getattr(error, "reason", str(error)), HTTPStatus.UNPROCESSABLE_ENTITY
        return Prediction(image.name, reason=reason), status


# What a server answers: the schema of every answer, for programs and for the interface's page.


class ImageAnswer(BaseModel):
    """The answer for one file.

    Attributes:
        name: the file's name as sent.
        label: the most probable class; None if the file cannot be used.
        confidence: its probability, in [0, 1].
        probabilities: of all classes, by name.
        energy: higher for images less like the training images; None without an out-of-distribution
            score.
        unlike_training: whether the image is out of distribution; None without a score.
        reason: why the file cannot be used.
    """

    name: str
    label: str | None = None
    confidence: float | None = None
    probabilities: dict[str, float] = {}
    energy: float | None = None
    unlike_training: bool | None = None
    reason: str | None = None


class PredictAnswer(BaseModel):
    """The answer of ``/predict``.

    Attributes:
        images: answers in the order of the files.
        diagnostics: warnings about the model; empty without warnings.
        detail: why no file could be used, if none could.
    """

    images: list[ImageAnswer]
    diagnostics: tuple[Diagnostic, ...] = ()
    detail: str | None = None


class ModelAnswer(ModelDescription):
    """The answer of ``/model``: the model's description, and which images are accepted.

    Attributes:
        formats: suffixes of accepted files.
        limits: limits on requests.
    """

    formats: list[str]
    limits: ServeLimits


def answer_about(classifier: ImageClassifier, found: Sequence[Answered]) -> JSONResponse:
    """Returns the response to a request's files; an error status only if all files failed.

    If some files can be used, the request succeeds; the others give the reason.
    """
    names = classifier.class_names
    images = [
        ImageAnswer(
            name=image.file,
            label=image.label,
            confidence=rounded(image.confidence),
            probabilities=dict(zip(names, (round(p, 6) for p in image.probabilities))),
            energy=rounded(image.energy),
            unlike_training=image.unlike_training,
            reason=image.reason,
        )
        for image, _ in found
    ]
    usable = any(status == HTTPStatus.OK for _, status in found)
    detail = None if usable else images[0].reason
    answer = PredictAnswer(images=images, diagnostics=classifier.diagnostics, detail=detail)
    return JSONResponse(answer.model_dump(mode="json"), HTTPStatus.OK if usable else found[0][1])


PAGE = Path(__file__).parent / "page"
_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
_FORM = {"schema": {"type": "object", "properties": {"images": _FILES}}}
MULTIPART = {"requestBody": {"required": True, "content": {"multipart/form-data": _FORM}}}
"""OpenAPI description of ``/predict``'s body, which is read without FastAPI."""


def create_application(
    classifier: ImageClassifier,
    limits: ServeLimits | None = None,
    hosts: Collection[str] = LOOPBACK_NAMES,
) -> FastAPI:
    """Returns the application that serves a model.

    Args:
        classifier: the model; its predictions must not depend on earlier images.
        limits: limits on requests.
        hosts: names by which the server is reached; requests for other names are refused.
    """
    limits = limits or ServeLimits()
    known = dict(classifier.description)
    description = ModelAnswer(**known, formats=sorted(IMAGE_SUFFIXES), limits=limits)
    template = template_named("page.html.j2", "feddg.serving", "page")
    page = template.render(
        model=description,
        identity=classifier.identity,
        method=title_of(description.method or "model"),
        version=feddg.__version__,
    )
    names = {host.lower() for host in hosts}

    @asynccontextmanager
    async def life(application: FastAPI) -> AsyncIterator[None]:
        application.state.answerer = Answerer(classifier, limits)
        with quiet_pillow():  # an oversized image raises, odd ones are read
            yield
        application.state.answerer.close()

    # The interactive pages about the interface would be fetched from elsewhere.
    application = FastAPI(
        title="feddg", version=feddg.__version__, docs_url=None, redoc_url=None, lifespan=life
    )

    @application.middleware("http")
    async def let_in(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        refusal = refusal_of(request.method, request.headers, names)
        reply = refusal or await call_next(request)
        reply.headers.update(HEADERS)
        return reply

    @application.post("/predict", response_model=PredictAnswer, openapi_extra=MULTIPART)
    async def predict(request: Request) -> JSONResponse:
        """Predicts the classes of a request's images; stores none of them."""
        return answer_about(classifier, await application.state.answerer(request))

    @application.get("/model")
    async def model() -> ModelAnswer:
        """Returns which model this is, which images it accepts, and how good it was."""
        return description

    @application.get("/health")
    async def health() -> dict[str, str]:
        """Returns whether the server answers."""
        return {"status": "ok"}

    @application.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page)

    application.mount("/static", StaticFiles(directory=PAGE / "static"))
    return application
