"""What a server answers: the form of every answer, for programs and for the interface's page."""

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict

import feddg
from feddg.data.images import usable_formats
from feddg.prediction.classifier import ImageClassifier
from feddg.prediction.predict import rounded
from feddg.serving.answerer import Answered
from feddg.serving.limits import ServeLimits


class ImageAnswer(BaseModel):
    """What is answered about one file.

    Attributes:
        name: as it was sent.
        label: the most probable class; None where the file cannot be used.
        confidence: its probability, in [0, 1].
        probabilities: of all classes, by name.
        energy: the higher, the less it is like images of training; None without a warning light.
        unlike_training: whether the warning light is on; None without one.
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
        cautions: what must be said of the model; empty where nothing speaks against it.
        detail: why no file could be used, where none could.
    """

    images: list[ImageAnswer]
    cautions: tuple[str, ...] = ()
    detail: str | None = None


class ModelAnswer(BaseModel):
    """What ``/model`` answers: whose weights answer, and what they take.

    Attributes:
        identity: experiment, method, backbone, selection rule, round, hash of the weights.
        classes: in the order of the probabilities.
        image_size: side of the square that images are resized to, pixels.
        resize: how they become square.
        energy_threshold: where the warning light goes on; None without one.
        result: how good the model was where nobody trained.
        cautions: what must be said of it; empty where nothing speaks against it.
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
    cautions: tuple[str, ...]
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
        cautions=classifier.cautions,
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
    answer = PredictAnswer(images=images, cautions=classifier.cautions, detail=detail)
    return answer, HTTPStatus.OK if usable else found[0].status
