"""From a policy to the same policy with adapters, and what each of them costs on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import RequestError, number, whole_number
from ...llm import LLM, Prompt
from ...policy import DepthPolicy
from ..calibration.measured_model import batch_size, measured_model
from ..calibration.progress import Report
from ..calibration.prompts import BATCH, encode_prompts
from .prompts import builtin_prompts
from .summary import Healing

if TYPE_CHECKING:
    from .train import Evaluation

RANK = 128
MAX_PROMPTS, MAX_MINUTES = 4000, 1e6


def heal(
    model: LLM | str | Path,
    policy: DepthPolicy | str | Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    minutes: float = 30.0,
    rank: int | None = None,
    seed: int = 0,
    progress: Report | None = None,
    report: Callable[[Evaluation], None] | None = None,
) -> Healing:
    """Train a stand-in for each layer that a policy skips, by distillation from full depth.

    The model's weights stay as they are. Training may be killed at any moment: called again with the same arguments,
    it continues from its last checkpoint in the cache folder, and gives what it finished once more.

    Args:
        model: an `LLM`, or what `LLM` takes.
        policy: a policy, the name of a shipped one, or a file. If it has adapters, training goes on from them.
        prompts: texts or messages to learn from, at least 10 different ones; default about 700 built-in ones.
        minutes: for training and for the outputs to learn from; the final figures come on top.
        rank: of new adapters, 1 to 4096; default 128, or that of the adapters which the policy has.
        seed: of the adapters' first values, and of the order of prompts and depths.
        progress: called with a stage and what part of it, 0 to 1, was done since the last call.
        report: called after each evaluation on held-out prompts.

    Raises:
        RequestError: an argument out of its range, too few prompts, no time left to train, or PyTorch is missing; the
            policy skips nothing, or a rank is given for one that has adapters; the model has recurrent layers.
        PolicyError: the policy is for another model.
        ModelError: the model is missing, damaged or not supported.
    """
    healed = import_healing()
    minutes = number("minutes", minutes, 0, MAX_MINUTES, above=True)
    rank, seed = None if rank is None else whole_number("rank", rank, 1, 4096), whole_number("seed", seed, 0)
    if isinstance(prompts, str | Path):
        raise RequestError("prompts must be a list of prompts, not one text or path")
    prompts = builtin_prompts() if prompts is None else prompts
    llm = model if isinstance(model, LLM) else LLM(str(model), max_batch_size=batch_size(BATCH))
    policy = llm.resolve_policy(policy)
    if policy.adapters is not None and rank is not None:
        raise RequestError(f"policy {policy.label} has adapters, which keep their rank", "leave out the rank")
    if llm.config.mixer is not None:
        raise RequestError("adapters cannot be trained through recurrent layers yet", "use the policy without adapters")
    if llm.config.num_streams > 1:
        raise RequestError("adapters are for models with one hidden state a token", "use the policy without adapters")
    if not policy.tapers:
        raise RequestError(f"policy {policy.label} skips no layer", "choose another policy")
    rank = rank or RANK if policy.adapters is None else policy.adapters.rank
    with measured_model(llm, progress) as measured:
        ids = list(encode_prompts(llm, prompts, seed, MAX_PROMPTS))
        return healed(measured, policy, ids, 60 * minutes, rank, seed, report or (lambda evaluation: None))


def import_healing() -> Callable[..., Healing]:
    """What does the work.

    Raises:
        RequestError: PyTorch is missing.
    """
    try:
        from .stages import healed
    except ImportError as error:
        if error.name != "torch":
            raise
        raise RequestError("training adapters needs PyTorch", 'pip install "taper-llm[heal]"') from None
    return healed
