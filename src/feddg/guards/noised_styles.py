"""Style privacy: the moments that a client describes itself with are noised before they leave.

The client's method does it (:mod:`feddg.styles.statistics`); this guard says what it promises, counts
what it costs, and is why other guards let the description pass. Styles leave once, before round 1.
"""

from collections.abc import Sequence

from feddg.guards.account import Account, Release
from feddg.guards.accounting import gaussian_noise, rounded_up
from feddg.guards.guard import Guard
from feddg.settings import PrivacySettings


def style_multiplier(privacy: PrivacySettings) -> float:
    """Returns the noise of a style over its sensitivity; 0 where none is asked for."""
    if privacy.style_epsilon is None:
        return 0.0
    return rounded_up(gaussian_noise(privacy.style_epsilon, privacy.delta))


class NoisedStyles(Guard):
    """Styles that say little about an image, or a client."""

    name = "noised_styles"
    summary = "styles from clipped and noised moments; asked for as privacy.style_epsilon"
    Settings = PrivacySettings

    @property
    def promise(self) -> str:
        """Epsilon, and for whom."""
        chosen = self.settings
        whom = "an image" if chosen.style_unit == "image" else "a client"
        return (
            f"styles: epsilon {chosen.style_epsilon:g} at delta {chosen.delta:g} for {whom}, by "
            f"noise of {style_multiplier(chosen):g} times the sensitivity at the client"
        )

    def describing(self, clients: Sequence[int], account: Account) -> None:
        """Charges for the styles that these clients are about to send.

        Raises:
            BudgetSpent: they have sent them before.
        """
        chosen, noise = self.settings, style_multiplier(self.settings)
        where, unit = "client", chosen.style_unit
        release = Release("describe", 0, clients, noise, unit, where)  # type: ignore[arg-type]
        account.charge(release, chosen.delta, chosen.style_epsilon)
