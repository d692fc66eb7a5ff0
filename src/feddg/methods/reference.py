"""What a method was compared with, and where it differs: declared beside each method.

Its page is made from this, so that a difference stands in one place.
"""

import inspect
import sys
from dataclasses import dataclass


def idea_of(method: type) -> str:
    """Returns a method's idea: the first paragraph of its module's docstring, below its title."""
    text = inspect.getdoc(sys.modules[method.__module__]) or ""
    paragraphs = text.split("\n\n")
    return " ".join(paragraphs[1].split()).replace("``", "") if len(paragraphs) > 1 else ""


@dataclass(frozen=True)
class CodeDifference:
    """One thing that a method here does otherwise than its authors' code.

    Attributes:
        theirs: what the code does.
        ours: what happens here.
        why: the reason.
        setting: what follows the code, as fields of an experiment with spaces between them
            (``method.muting=spatial``); empty where nothing does.
    """

    theirs: str
    ours: str
    why: str
    setting: str = ""


@dataclass(frozen=True)
class Reference:
    """What a method was compared with.

    Attributes:
        code: whose code, or why there is none.
        differences: all that are known; none is an answer, too.
    """

    code: str
    differences: tuple[CodeDifference, ...] = ()


NO_DIFFERENCE = "No difference is known."

HUE = CodeDifference(
    "torchvision's colour jitter: steps in random order, each clamped, the hue shifted in HSV",
    "one matrix an image, clamped once; the hue turns at constant luma (YIQ), which at 0.1 is"
    " 0.076 "
    "a pixel away in the mean",
    "a third of the time; the same for every method that is compared",
    "train.hue=hsv",
)
"""Of every method whose code jitters colours."""

CONTENT_VARIANCE = CodeDifference(
    "AdaIN divides the content's variance by n - 1",
    "by n, as the style's",
    "one definition of a style; at 28 x 28 places they are 0.06 % apart",
    "method.content_variance=n-1",
)
"""Of the methods that re-draw with AdaIN."""

EIGHT_BITS = CodeDifference(
    "re-draws every augmented batch, in floating point",
    "all images are re-drawn once, rounded to 8 bits, and augmented with their originals",
    "re-drawing every batch costs several times the training",
    "method.twins=on_the_fly",
)
"""Of the methods whose code never keeps what it re-draws."""
