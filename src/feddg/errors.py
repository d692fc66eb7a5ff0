"""Errors a user can act on.

Everything a user's input can cause ends in one of these: the command line prints the
message alone, without a traceback.
"""

import difflib
from collections.abc import Iterable


class FeddgError(Exception):
    """A mistake or fault with one clear remedy; its message names the thing and what to do."""


class DataError(FeddgError):
    """Images, folders, splits or partitions that cannot be used as asked."""


class ExperimentError(FeddgError):
    """An experiment, or a method's settings, that contradict themselves or are out of range."""


class WeightsError(FeddgError):
    """A weights file that is missing, unreadable or of the wrong shape."""


class RunError(FeddgError):
    """A run folder that cannot be written, read or continued."""


class AdaptationError(FeddgError):
    """A test-time adaptation that is unknown, or that a model cannot be served with."""


class NotEnoughUpdates(RunError):
    """Fewer good updates than a round may be fused from; it is tried again with other clients."""


class BudgetSpent(RunError):
    """A release would cost more privacy than may be spent; the run ends before it."""


class ClientError(FeddgError):
    """One client cannot take part in this round; the round goes on without it if it may."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the closest known word, or an empty text."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
