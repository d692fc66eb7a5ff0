"""Whether a promise can be kept, and means anything: asked before round 1."""

import logging

from feddg.errors import ExperimentError
from feddg.guards.accounting import MOST_NOISE, gaussian_epsilon, gaussian_noise
from feddg.settings import PrivacySettings

log = logging.getLogger("feddg")

WEAKEST = 50.0
"""An epsilon above which the bound is empty: what is seen may be e^50 times as likely."""
MOST_STYLE_NOISE = 1e3
"""Beyond this multiple of its sensitivity a style of thousands of images is noise alone."""


def require_meaning(privacy: PrivacySettings, clients: int) -> None:
    """Warns where a promise is kept and still says nothing; refuses a style that is all noise.

    Args:
        privacy: what is promised.
        clients: of the federation.

    Raises:
        ExperimentError: a style could only be noise; says which epsilon could be met.
    """
    epsilons = {
        name: value
        for name in ("epsilon", "style_epsilon", "record_epsilon")
        if (value := getattr(privacy, name)) is not None
    }
    for name, epsilon in epsilons.items():
        if epsilon > WEAKEST:
            log.warning(
                "privacy.%s %g promises nothing: choose 1 for strong, 8 for weak protection",
                *(name, epsilon),
            )
    if epsilons and privacy.delta * clients >= 1:
        log.warning(
            "delta %g allows to give away one of %d clients wholly; set privacy.delta below %g",
            *(privacy.delta, clients, 1 / clients),
        )
    if privacy.style_epsilon is not None:
        noise = gaussian_noise(privacy.style_epsilon, privacy.delta)
        least = gaussian_epsilon(MOST_STYLE_NOISE, privacy.delta)
        require_bearable("style_epsilon", privacy.style_epsilon, noise, least, MOST_STYLE_NOISE)


def require_bearable(
    name: str, epsilon: float, noise: float, least: float, most: float = MOST_NOISE
) -> None:
    """Raises ExperimentError where an epsilon needs more noise than leaves anything.

    Args:
        name: the field of ``privacy``.
        epsilon: asked for.
        noise: what it needs, over the sensitivity.
        least: the least epsilon that can be met.
        most: the most noise that leaves anything.
    """
    if noise > most:
        raise ExperimentError(
            f"privacy.{name} {epsilon:g} would need noise of {noise:.3g} times the norm, under "
            f"which nothing is learned; {least:.2g} is the least that can be met"
        )


def require_afforded(privacy: PrivacySettings, once: float) -> None:
    """Raises ExperimentError where a single round, which costs ``once``, is more than epsilon."""
    if privacy.epsilon is not None and once > privacy.epsilon:
        raise ExperimentError(
            f"privacy.epsilon {privacy.epsilon:g} cannot be met with noise_multiplier "
            f"{privacy.noise_multiplier:g}: one round costs {once:.4g}. Set epsilon to at "
            f"least {once * 1.0005:.4g}, or leave noise_multiplier away: it is chosen then"
        )
