"""Fused kernels without a GPU: Triton's interpreter runs them, with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from taper.backends.torch import TorchBackend


class Interpreted(TorchBackend):
    """Steps as a GPU captures them, run at once on a CPU."""

    _use_graphs = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]

    def _synchronize(self) -> None:
        pass

    def _capture(self, compute: Any, inputs: np.ndarray) -> Any:
        return lambda inputs: compute(torch.from_numpy(inputs))
