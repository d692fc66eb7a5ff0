"""Runs that several files of tests look at, each trained once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trained_runs import trained_run

SHORT = {"train": {"rounds": 1, "local_steps": 15, "batch_size": 32, "augmentation": "none"}}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """FedAvg on digits, good enough for an out-of-distribution score."""
    return trained_run(tmp_path_factory.mktemp("runs"), cache)


@pytest.fixture(scope="session")
def run_of(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, finished: Path
) -> Callable[[str], Path]:
    """Gives a run of a method, trained once; but for FedAvg a short one."""
    out, runs = tmp_path_factory.mktemp("runs"), {"fedavg": finished}

    def run(method: str) -> Path:
        if method not in runs:
            runs[method] = trained_run(out, cache, method, **SHORT)
        return runs[method]

    return run


@pytest.fixture(scope="session")
def meaningless(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run that has learnt nothing."""
    train = {"rounds": 1, "local_steps": 1, "batch_size": 8, "lr": 1e-9, "augmentation": "none"}
    return trained_run(tmp_path_factory.mktemp("runs"), cache, train=train)
