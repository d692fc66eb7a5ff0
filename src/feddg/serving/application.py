"""The web application: ``/predict``, ``/health``, ``/model``, and a page for people."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

import feddg
from feddg.data.decoding import quiet_pillow
from feddg.methods.base import title_of
from feddg.prediction.classifier import ImageClassifier
from feddg.report.blocks import template_named
from feddg.serving.answerer import Answerer
from feddg.serving.answers import ModelAnswer, PredictAnswer, about, answer_about
from feddg.serving.door import LOOPBACK_NAMES, Door
from feddg.serving.faults import RequestFault
from feddg.serving.limits import ServeLimits
from feddg.serving.line import RequestLine
from feddg.serving.uploads import read_uploads, refuse_large

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
