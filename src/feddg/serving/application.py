"""The web application: ``/predict``, ``/health``, ``/model``, and a page for people."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import Any

import numpy
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

import feddg
from feddg.clients.threads import available_cores
from feddg.data.decoding import (
    OversizedImageError,
    UnknownFormatError,
    UnusableImageError,
    names_in,
    quiet_pillow,
)
from feddg.data.images import ImageBytes, usable_formats
from feddg.diagnostics import Diagnostic
from feddg.methods.base import title_of
from feddg.prediction.classifier import ImageClassifier
from feddg.prediction.predict import Prediction, prediction_of, rounded
from feddg.report.blocks import template_named
from feddg.serving.server import LOOPBACK_NAMES, Door, RequestFault, ServeLimits

# The line of requests: a few are worked on, some wait, and who comes after that is sent away.


class RequestLine:
    """Lets ``at_once`` requests work; of who waits, no body is read.

    Args:
        limits: on requests.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._free = asyncio.Semaphore(limits.at_once)
        self._waiting = 0

    async def __aenter__(self) -> None:
        """Waits for a turn.

        Raises:
            RequestFault: too many wait.
        """
        if self._free.locked() and self._waiting >= self._limits.waiting:
            raise RequestFault(
                HTTPStatus.SERVICE_UNAVAILABLE, "too many requests wait; send this one again later"
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        """Lets the next one work."""
        self._free.release()


# The images in a request: read into memory within limits, and never laid down on a disk.


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


# From uploaded files to answers: decoded side by side, predicted together with whatever waits.


log = logging.getLogger("feddg")
MOST_DECODERS = 4
MOST_TOGETHER = 64
"""Images of one forward pass."""
FAILED = "the model failed on these images; the server's log says why"


@dataclass(frozen=True)
class Answered:
    """What came of one uploaded file.

    Attributes:
        prediction: the model's, or the reason why there is none.
        status: of HTTP, were it the only file.
    """

    prediction: Prediction
    status: HTTPStatus = HTTPStatus.OK


class Answerer:
    """Answers uploaded files; belongs to one event loop.

    One thread asks the model, so that what waits meanwhile is answered in one pass.

    Args:
        classifier: the model; one whose answers do not depend on the images before.
        most_pixels: of an image that is decoded.
    """

    def __init__(self, classifier: ImageClassifier, most_pixels: int) -> None:
        self._classifier, self._most_pixels = classifier, most_pixels
        decoders = min(MOST_DECODERS, available_cores())
        self._decoders = ThreadPoolExecutor(decoders, thread_name_prefix="decode")
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._waiting: list[tuple[numpy.ndarray, asyncio.Future[tuple[numpy.ndarray, float]]]] = []
        self._at_work: asyncio.Task[None] | None = None

    async def __call__(self, images: Sequence[ImageBytes]) -> list[Answered]:
        """Returns what came of each file.

        Raises:
            RequestFault: the model failed.
        """
        return list(await asyncio.gather(*map(self._one, images)))

    def close(self) -> None:
        """Ends the threads."""
        self._decoders.shutdown(cancel_futures=True)
        self._model.shutdown(cancel_futures=True)

    async def _one(self, image: ImageBytes) -> Answered:
        loop = asyncio.get_running_loop()
        try:
            pixels = await loop.run_in_executor(self._decoders, self._decode, image)
        except UnusableImageError as error:
            said, status = self._fault(error)
            return Answered(Prediction(image.name, reason=said), status)
        answer = loop.create_future()
        self._waiting.append((pixels, answer))
        if self._at_work is None or self._at_work.done():
            self._at_work = loop.create_task(self._work())
        shares, energy = await answer
        return Answered(prediction_of(self._classifier, image.name, shares, energy))

    async def _work(self) -> None:
        """Answers what waits, until nothing does."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            part, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
            pixels = numpy.stack([image for image, _ in part])
            try:
                found = await loop.run_in_executor(self._model, self._classifier.answer, pixels)
            except Exception:  # out of memory, say; whoever waits must be told
                log.exception("the model failed")
                for _, answer in part:
                    if not answer.done():
                        answer.set_exception(RequestFault(HTTPStatus.INTERNAL_SERVER_ERROR, FAILED))
                continue
            for (_, answer), shares, energy in zip(part, *found):
                if not answer.done():  # its request may have gone away
                    answer.set_result((shares, float(energy)))

    def _decode(self, image: ImageBytes) -> numpy.ndarray:
        look = self._classifier.preparation
        side = look.reading.tile
        if side is not None and len(names_in(image, image.name, side)) > 1:
            raise UnusableImageError(
                f"the model was trained on tiles of {side} x {side} pixels: send tiles, or use "
                "`feddg predict`, which cuts them"
            )
        return look.decode(image, self._most_pixels)

    def _fault(self, error: UnusableImageError) -> tuple[str, HTTPStatus]:
        if isinstance(error, OversizedImageError):
            said = f"it has more than {self._most_pixels / 1e6:g} million pixels, the limit here"
            return said, HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        if isinstance(error, UnknownFormatError):
            return str(error), HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        return str(error), HTTPStatus.UNPROCESSABLE_ENTITY


# What a server answers: the form of every answer, for programs and for the interface's page.


class ImageAnswer(BaseModel):
    """What is answered about one file.

    Attributes:
        name: as it was sent.
        label: the most probable class; None where the file cannot be used.
        confidence: its probability, in [0, 1].
        probabilities: of all classes, by name.
        energy: the higher, the less it is like images of training; None without a
        out-of-distribution score.
        unlike_training: whether it is out of distribution; None without one.
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
    """What ``/predict`` answers.

    Attributes:
        images: in the order they were sent.
        diagnostics: the warnings about the model; empty where nothing speaks against it.
        detail: why no file could be used, where none could.
    """

    images: list[ImageAnswer]
    diagnostics: tuple[Diagnostic, ...] = ()
    detail: str | None = None


class ModelAnswer(BaseModel):
    """What ``/model`` answers: whose weights answer, and what they take.

    Attributes:
        identity: experiment, method, backbone, selection rule, round, hash of the weights.
        classes: in the order of the probabilities.
        image_size: side of the square that images are resized to, pixels.
        resize: how they become square.
        energy_threshold: where the out-of-distribution score goes on; None without one.
        result: how good the model was where nobody trained.
        diagnostics: the warnings about it; empty where nothing speaks against it.
        formats: endings of the files that are taken.
        limits: on a request.
        feddg: the version.
    """

    model_config = ConfigDict(frozen=True)

    identity: dict[str, Any]
    classes: tuple[str, ...]
    image_size: int
    resize: str
    energy_threshold: float | None
    result: str
    diagnostics: tuple[Diagnostic, ...]
    formats: list[str]
    limits: ServeLimits
    feddg: str


def about(classifier: ImageClassifier, limits: ServeLimits) -> ModelAnswer:
    """Returns what a model says of itself."""
    look = classifier.preparation
    return ModelAnswer(
        identity=dict(classifier.identity),
        classes=classifier.class_names,
        image_size=look.size,
        resize=look.resize,
        energy_threshold=classifier.threshold,
        result=classifier.result,
        diagnostics=classifier.diagnostics,
        formats=sorted(usable_formats()),
        limits=limits,
        feddg=feddg.__version__,
    )


def answer_about(
    classifier: ImageClassifier, found: list[Answered]
) -> tuple[PredictAnswer, HTTPStatus]:
    """Returns the answer about a request's files, and its status: that of a fault if all have one.

    Several files of which some can be used are a success; the others say why not.
    """
    usable = any(one.status == HTTPStatus.OK for one in found)
    images = [
        ImageAnswer(
            name=said.file,
            label=said.label,
            confidence=rounded(said.confidence),
            probabilities={
                name: round(share, 6)
                for name, share in zip(classifier.class_names, said.probabilities)
            },
            energy=rounded(said.energy),
            unlike_training=said.unlike_training,
            reason=said.reason,
        )
        for said in (one.prediction for one in found)
    ]
    detail = None if usable else images[0].reason
    answer = PredictAnswer(images=images, diagnostics=classifier.diagnostics, detail=detail)
    return answer, HTTPStatus.OK if usable else found[0].status


MULTIPART = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "images": {"type": "array", "items": {"type": "string", "format": "binary"}}
                    },
                }
            }
        },
    }
}
"""The body of ``/predict``, which is read by hand, as the interface's description has it."""


def create_application(
    classifier: ImageClassifier,
    limits: ServeLimits | None = None,
    hosts: Collection[str] = LOOPBACK_NAMES,
) -> FastAPI:
    """Returns the application that serves a model.

    Args:
        classifier: the model; one whose answers do not depend on the images before.
        limits: on requests.
        hosts: names by which the server is reached; requests for other names are refused.
    """
    service = _Service(classifier, limits or ServeLimits())
    # The interactive pages about the interface would be fetched from elsewhere.
    application = FastAPI(
        title="feddg",
        version=feddg.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=service.life,
        exception_handlers={RequestFault: _refusal},
    )
    application.add_api_route(
        "/predict",
        service.predict,
        methods=["POST"],
        response_model=PredictAnswer,
        openapi_extra=MULTIPART,
    )
    application.add_api_route("/model", service.model)
    application.add_api_route("/health", service.health)
    for path, show in {"/": service.page, "/page.css": _style, "/page.js": _script}.items():
        application.add_api_route(path, show, include_in_schema=False, response_model=None)
    application.add_middleware(Door, hosts=hosts)
    return application


class _Service:
    """What answers: one model, one line of requests."""

    def __init__(self, classifier: ImageClassifier, limits: ServeLimits) -> None:
        self._classifier, self._limits = classifier, limits
        self._line = RequestLine(limits)
        self._about = about(classifier, limits)
        self._page = _render(self._about)

    @asynccontextmanager
    async def life(self, application: FastAPI) -> AsyncIterator[None]:
        """Has threads ready for as long as the server runs."""
        self._answerer = Answerer(self._classifier, self._limits.pixels)
        with quiet_pillow():  # an oversized image raises, odd ones are read
            yield
        self._answerer.close()

    async def predict(self, request: Request) -> JSONResponse:
        """Labels the images of a request, and keeps none of them."""
        refuse_large(request, self._limits)
        async with self._line:
            images = await read_uploads(request, self._limits)
            found = await self._answerer(images)
        answer, status = answer_about(self._classifier, found)
        return JSONResponse(answer.model_dump(mode="json"), status)

    async def model(self) -> ModelAnswer:
        """Whose weights answer, what they take, and how good they were."""
        return self._about

    async def health(self) -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "ok"}

    async def page(self) -> HTMLResponse:
        """The page on which one drops images."""
        return HTMLResponse(self._page)


async def _refusal(request: Request, fault: Exception) -> JSONResponse:
    assert isinstance(fault, RequestFault)
    busy = fault.status == HTTPStatus.SERVICE_UNAVAILABLE
    headers = {"Retry-After": "5"} if busy else None
    return JSONResponse({"detail": str(fault)}, fault.status, headers)


async def _style() -> Response:
    return Response(_shipped("page.css"), media_type="text/css")


async def _script() -> Response:
    return Response(_shipped("page.js"), media_type="text/javascript")


def _shipped(name: str) -> str:
    return (files("feddg.serving") / "page" / name).read_text("utf-8")


def _render(model: ModelAnswer) -> str:
    method = title_of(str(model.identity.get("method") or "model"))
    template = template_named("page.html.j2", "feddg.serving", "page")
    return template.render(model=model, method=method)
