"""Small runs that are attacked, each trained once, and attacks on them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from feddg.attacks.attack import AttackSettings, attack_run
from feddg.attacks.senders import MembershipEffort
from feddg.records import AttackRow
from trained_runs import write_images

SMALL = {
    "data": {"source": "digits", "image_size": 12, "id_val": 0.8, "id_test": 0},
    "clients": {"number": 6, "partition": "domain"},
    "train": {"rounds": 1, "local_steps": 1, "batch_size": 16, "augmentation": "none"},
    "evaluate": {"every": 1},
}


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with public images."""
    folder = tmp_path_factory.mktemp("attacks")
    write_images(folder / "public", 18)
    return folder


@pytest.fixture(scope="session")
def runs(train_once: Callable[..., Path]) -> Callable[..., Path]:
    """Gives a run of a method; fields change its experiment."""
    return lambda method, **changes: train_once(method, **SMALL | changes)


@pytest.fixture(scope="session")
def quick(place: Path) -> AttackSettings:
    """Attacks that take a second."""
    return AttackSettings(
        public=(place / "public",),
        steps=2,
        targets=12,
        updates=2,
        batch_sizes=(1, 2),
        iterations=4,
        membership=MembershipEffort(clients=2, images=8, shadows=2),
    )


@pytest.fixture(scope="session")
def attack(place: Path, runs: Callable[..., Path], quick: AttackSettings) -> Callable:
    """Attacks a run; what an earlier attack found is given again, but where ``again`` is asked."""
    found: dict[tuple[str, str], list[AttackRow]] = {}

    def carry_out(method: str, kind: str, *, again: bool = False) -> list[AttackRow]:
        if again or (method, kind) not in found:
            rows = attack_run(runs(method), kind, quick, cache=place / "cache")
            found[method, kind] = rows
        return found[method, kind]

    return carry_out
