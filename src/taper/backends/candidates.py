"""The logits of a token on a GPU: only those that may be sampled come to the host.

To bring all of a large vocabulary there, and to sample from all, would take part of the time of each step.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

COUNT = 1024  # tokens that come to the host at once, the most probable ones
_REACH = 5.0  # below the highest logit, in which all matters that `min_p` may choose (`SamplingParams.reach`)


class Candidates:
    """The logits of one token, the largest of which are on the host (see `PreviewedLogits`).

    Nothing is approximate: what is called so is every logit, fetched when it is first asked for.
    """

    def __init__(self, logits: Tensor, ids: np.ndarray, values: np.ndarray) -> None:
        """Of logits [vocab_size] on the device, the largest `values`, float32 [n], of tokens `ids`, largest first."""
        self._logits, self._ids, self._values = logits, ids, values

    @cached_property
    def _fetched(self) -> np.ndarray:
        logits: np.ndarray = self._logits.float().cpu().numpy()
        return logits

    @cached_property
    def approximate(self) -> np.ndarray:
        """Float32 [vocab_size]; the caller may change them before it asks for the shortlist."""
        return self.whole()

    def shortlist(self, reach: float = 0.0) -> np.ndarray | None:
        """The tokens that matter, ascending: int64 [n]; None if these may be others than the most probable ones."""
        if "approximate" in self.__dict__:  # which may have been changed
            return None
        highest, least = self._values[0], self._values[0] - max(reach, _REACH)
        if not np.isfinite(highest) or self._values[-1] >= least:
            return None
        chosen: np.ndarray = np.sort(self._ids[self._values >= least] if reach else self._ids)
        return chosen

    def exact(self, ids: np.ndarray) -> np.ndarray:
        """The logits of some tokens: float32 [n]."""
        if "_fetched" in self.__dict__:
            values: np.ndarray = self._fetched[ids]
        else:
            order = np.argsort(self._ids)
            values = self._values[order[np.searchsorted(self._ids, ids, sorter=order)]]
        return values

    def whole(self) -> np.ndarray:
        """The logits of all tokens: float32 [vocab_size]."""
        logits: np.ndarray = self._fetched.copy()
        return logits


def largest(logits: Tensor) -> tuple[Candidates, ...]:
    """Of each row of logits [N, vocab_size], which nobody overwrites."""
    if not len(logits):
        return ()
    values, ids = torch.topk(logits.float(), min(COUNT, logits.shape[1]))
    rows = zip(logits, ids.cpu().numpy(), values.cpu().numpy(), strict=True)
    return tuple(Candidates(*row) for row in rows)
