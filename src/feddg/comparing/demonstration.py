"""What ``feddg demo`` compares: four methods on digits drawn in four ways, each way unseen once."""

from collections.abc import Mapping
from typing import Any

from feddg.comparing.plan import Plan
from feddg.settings import merge

DEMO: Mapping[str, Any] = {
    "name": "demo",
    "title": "The demo: which method travels?",
    "question": "Scanned digits are drawn as ink, chalk, photo and sketch; each in turn is the "
    "domain that no client trains on, and what is served is the mean of the last rounds.",
    "base": {
        "data": {"source": "digits", "image_size": 16, "id_val": 0, "id_test": 0},
        "train": {"rounds": 6, "local_epochs": 1},
        "server": {"serve": "tail"},
        "evaluate": {"every": 3},
    },
    "methods": ["fedavg", "pardon", "mixstyle", "randaug"],
    "hold_out": "lodo",
    "seeds": 2,
}
"""Small images and few rounds, for a minute or so; docs/results/digits.md has the long version."""


def demo_plan(axes: Mapping[str, Any], said: Mapping[str, Any]) -> Plan:
    """Returns the demo's plan, with what the user says over it.

    Args:
        axes: fields of the plan.
        said: fields of the experiment.

    Raises:
        ExperimentError: together they are no valid plan.
    """
    plan = merge(dict(DEMO), axes)
    return Plan(**{**plan, "base": merge(plan["base"], said)})
