"""The logits of a token on a GPU: only those that may be sampled come to the host.

To bring all of a large vocabulary there, and to sample from all, would take part of the time of each step.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from . import Adjust, Shortlist, likeliest

COUNT = 1024  # tokens that come to the host at once, the most probable ones
# What may matter where the reach is 0 (`SamplingParams.reach`): so far below the highest logit, and so many tokens.
_REACH, _CHOSEN = 5.0, 64


class Candidates:
    """The logits of one token, the largest of which are on the host (see `PreviewedLogits`).

    Nothing is approximate: what is called so is every logit, fetched when it is first asked for.
    """

    def __init__(self, logits: Tensor, ids: np.ndarray, values: np.ndarray) -> None:
        """Of logits [vocab_size] on the device, the largest: `values`, float32 [n], of tokens `ids`, ascending."""
        self._logits, self._ids, self._values = logits, ids, values

    @cached_property
    def approximate(self) -> np.ndarray:
        """Float32 [vocab_size]."""
        logits: np.ndarray = self._logits.float().cpu().numpy()
        return logits

    def likeliest(self) -> tuple[int, float]:
        """The most probable token and its probability (see `PreviewedLogits`), as if there were no others."""
        place, probability = likeliest(self._values)
        return int(self._ids[place]), probability

    def shortlist(self, reach: float = 0.0, adjust: Adjust | None = None) -> Shortlist | None:
        """The tokens that matter and their logits; None if these may be others than the most probable ones."""
        values, left_out = self._values, self._values.min()  # no logit that is not here is higher
        if adjust is not None:
            adjust(values := values.copy(), self._ids)
        highest = values.max()
        least = highest - max(reach, _REACH)
        if not reach:  # and as many as top_k may choose
            least = min(least, np.partition(values, -_CHOSEN)[-_CHOSEN])
        if not math.isfinite(highest) or left_out >= least:
            return None
        places = (values >= least).nonzero()[0]
        return self._ids[places], values[places]

    def exact(self, ids: np.ndarray) -> np.ndarray:
        """The logits of some tokens: float32 [n]."""
        if "approximate" in self.__dict__:
            logits: np.ndarray = self.approximate[ids]
        else:
            logits = self._values[self._ids.searchsorted(ids)]
        return logits

    def whole(self) -> np.ndarray:
        """The logits of all tokens: float32 [vocab_size]."""
        logits: np.ndarray = self.approximate.copy()
        return logits


def largest(logits: Tensor) -> tuple[Candidates, ...]:
    """Of each row of logits [N, vocab_size], which nobody overwrites."""
    if not len(logits):
        return ()
    ids = torch.topk(logits, min(COUNT, logits.shape[1])).indices.sort().values
    values = logits.gather(-1, ids).float()
    rows = zip(logits, ids.cpu().numpy(), values.cpu().numpy(), strict=True)
    return tuple(Candidates(*row) for row in rows)
