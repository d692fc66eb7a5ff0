"""What ``feddg demo`` compares: three methods on digits in four styles, each unseen once."""

from collections.abc import Mapping
from typing import Any

from feddg.clients.threads import available_cores
from feddg.comparing.cells import distinct, expand_plan
from feddg.comparing.plan import Plan
from feddg.settings import merge

DEMO: Mapping[str, Any] = {
    "name": "demo",
    "title": "The demo: which method travels",
    "question": "Scanned digits are drawn as ink, chalk, photo and sketch; each in turn is the "
    "domain that no client trains on, and what is served is the mean of the last rounds.",
    "base": {
        "data": {"source": "digits", "image_size": 16, "id_val": 0, "id_test": 0},
        "clients": {"number": 3, "heterogeneity": 0.5},
        "train": {
            "rounds": 6,
            "local_epochs": 1,
            "batch_size": 32,
            "lr": 3e-3,
            "augmentation": "none",
        },
        "server": {"serve": "tail", "tail": 0.34},
        "evaluate": {"every": 2},
    },
    "methods": ["fedavg", "mixstyle", "pardon"],
    "hold_out": "lodo",
    "seeds": 2,
}
"""Small images, large steps and few rounds, for a minute or two on two cores. They were chosen by
FedAvg's in-domain validation, and then among two settings by the whole demo, which shows held-out
domains: it is a demonstration and no result. docs/results/digits.md has the long comparison."""

MOST_JOBS = 16
"""Processes of half a gigabyte each: more would hardly be quicker."""


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


def jobs_of_demo(plan: Plan, said: int | None = None) -> int:
    """Returns how many processes carry the demo out; 0 where this one does it all the soonest.

    Args:
        plan: the demo's plan.
        said: how many the user asks for; none for one on each core.
    """
    runs = sum(1 for _ in distinct(expand_plan(plan)))
    jobs = min(said or available_cores(), MOST_JOBS, runs)
    return jobs if jobs > 1 else 0
