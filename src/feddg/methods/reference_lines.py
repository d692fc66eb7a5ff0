"""What the reference lines around a federation have in common: they are none themselves."""

from feddg.errors import ExperimentError
from feddg.settings import ExperimentSettings


def refuse_guards(experiment: ExperimentSettings, method: str, reason: str) -> None:
    """Refuses guards and update privacy.

    Args:
        experiment: what is to be run.
        method: the reference line's name.
        reason: why they could do nothing, as a verb phrase.

    Raises:
        ExperimentError: the experiment has some.
    """
    for field, given in (
        ("guards", bool(experiment.guards)),
        ("privacy", experiment.privacy.clipping != "none"),
    ):
        if given:
            raise ExperimentError(
                f"{method} {reason}: leave out {field}, or name a federated method"
            )
