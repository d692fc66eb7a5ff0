"""From uploaded files to answers: decoded side by side, predicted together with whatever waits."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

import numpy

from feddg.clients.threads import available_cores
from feddg.data.decoding import (
    OversizedImageError,
    UnknownFormatError,
    UnusableImageError,
    names_in,
)
from feddg.data.images import ImageBytes
from feddg.prediction.classifier import ImageClassifier
from feddg.prediction.predict import Prediction, prediction_of
from feddg.serving.faults import RequestFault

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
