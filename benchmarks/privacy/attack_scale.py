"""How much the measurement of attacks takes: in full, and so small that its numbers say nothing."""

from dataclasses import dataclass

from feddg.attacks.inversion import Step
from feddg.attacks.reconstruction import GeneratorTraining
from feddg.attacks.senders import MembershipEffort

_TRAINING = GeneratorTraining(steps=60, batch_size=16)
_MEMBERSHIP = MembershipEffort(clients=12, images=24, shadows=2)


@dataclass(frozen=True)
class Scale:
    """How much is attacked, and how hard.

    Attributes:
        train: images of each domain that clients hold.
        aside: held by nobody: in-domain validation.
        test: held by nobody, too.
        clients: of all domains together.
        size: side of an image in pixels.
        targets: true images of a reconstruction.
        training: of its generator.
        inversions: a client's optimizer, images behind an update, and how many updates.
        iterations: of the search behind an update.
        membership: of membership.
    """

    train: int = 512
    aside: int = 64
    test: int = 8
    clients: int = 64
    size: int = 64
    targets: int = 128
    training: GeneratorTraining = _TRAINING
    inversions: tuple[tuple[Step, int, int], ...] = (
        ("sgd", 1, 16),
        ("sgd", 4, 8),
        ("sgd", 8, 4),
        ("sgd", 32, 2),
        ("own", 1, 8),
        ("own", 8, 4),
    )
    iterations: int = 300
    membership: MembershipEffort = _MEMBERSHIP


FULL = Scale()
SMALL = Scale(
    train=16,
    aside=4,
    test=1,
    clients=8,
    size=32,
    targets=8,
    training=GeneratorTraining(steps=1, batch_size=4),
    inversions=(("sgd", 1, 1), ("own", 2, 1)),
    iterations=2,
    membership=MembershipEffort(clients=2, images=4, shadows=1),
)
