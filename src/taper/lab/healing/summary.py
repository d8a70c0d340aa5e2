"""What comes out of a healing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...policy import DepthPolicy
from ..calibration.summary import Validation, to_plain

if TYPE_CHECKING:
    from .train import Evaluation


@dataclass(frozen=True)
class Healing:
    """A healed policy, and what it cost before and costs after, as calibration measures it."""

    policy: DepthPolicy  # with the adapters of lowest held-out KL
    before: Validation
    after: Validation
    history: list[Evaluation]  # of training, on prompts held out from it
    seconds: float  # that training took, outputs to learn from included
    tokens: int  # that losses were computed on

    @property
    def helped(self) -> bool:
        """Whether KL on held-out prompts fell."""
        return self.after.held_out.all_steps.kl.value < self.before.held_out.all_steps.kl.value

    def plain(self) -> dict[str, Any]:
        """All figures as plain data."""
        names = ("before", "after", "history", "seconds", "tokens")
        return {name: to_plain(getattr(self, name)) for name in names} | {"helped": self.helped}
