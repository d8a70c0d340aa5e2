"""`taper heal`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError, number
from .common import NOT_HEALED, check_file, load, model_options, num_used, say, say_what_was_read, stages

if TYPE_CHECKING:
    from ..lab.healing.summary import Healing
    from ..lab.healing.train import Evaluation

_NOT_BETTER = 1


@click.command()
@model_options
@click.option("--policy", required=True, metavar="NAME|FILE", help="Policy to heal. Adapters that it has learn more.")
@click.option("--minutes", type=float, default=30.0, help="How long to train; the final figures come on top.")
@click.option(
    "--prompts", type=Path, metavar="FILE", help="Prompts to learn from, as for calibrate. Default: built-in."
)
@click.option("--rank", type=click.IntRange(1, 4096), help="Size of each new adapter. Default: 128.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the training.")
@click.option("--out", type=Path, default=Path("healed.safetensors"), help="Where to write the policy with adapters.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as one JSON object.")
def heal(
    policy: str,
    minutes: float,
    prompts: Path | None,
    rank: int | None,
    seed: int,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Train small stand-ins for the layers that a policy skips.

    With these adapters it loses less quality. The model answers prompts, and the adapters learn to give full depth's
    distribution. Its own weights stay as they are. Training needs PyTorch; it can be stopped at any moment and
    continues where it was. If KL on held-out prompts does not fall, taper says so, writes no policy and exits with
    code 1.
    """
    from ..models.policies import ADAPTERS_SUFFIX, save_policy

    if out.suffix != ADAPTERS_SUFFIX:
        raise RequestError(f"--out is {out}; a policy with adapters is a {ADAPTERS_SUFFIX} file", "rename it")
    check_file("--out", out)
    from ..lab.calibration.measured_model import batch_size
    from ..lab.calibration.prompts import BATCH, read_prompts
    from ..lab.healing.prompts import builtin_prompts, held_out
    from ..lab.healing.run import MAX_MINUTES, MAX_PROMPTS, import_healing
    from ..lab.healing.run import heal as run

    import_healing()  # reports that PyTorch is missing before the model loads
    number("minutes", minutes, 0, MAX_MINUTES, above=True)
    texts = builtin_prompts() if prompts is None else read_prompts(prompts)
    used = num_used(texts, MAX_PROMPTS)
    say_what_was_read(texts, prompts, used, f"{used - sum(held_out(used))} to learn from", sum(held_out(used)))
    llm = load(options, max_batch_size=batch_size(BATCH, options["device"]))
    with stages() as progress:
        result = run(llm, policy, texts, minutes=minutes, rank=rank, seed=seed, progress=progress, report=_report)
    if result.helped:
        save_policy(out, result.policy)
    if as_json:
        click.echo(json.dumps(result.plain()))
    else:
        _print(result)
    if not result.helped:
        say(f"taper: {NOT_HEALED}; {out} was not written")
        sys.exit(_NOT_BETTER)
    say(f'policy: {out}; try: taper generate --policy {out} "..."')


def _report(evaluation: Evaluation) -> None:
    say(
        f"{evaluation.elapsed_s / 60:5.1f} min, {evaluation.tokens} tokens: loss {evaluation.loss:.3f}, "
        f"held-out KL {evaluation.kl:.3f}, agreement {evaluation.agreement:.1%}"
    )


def _print(result: Healing) -> None:
    from ..lab.calibration.summary import interval
    from .terminal import METRICS, print_table

    validations = (result.before, result.after)
    losses = [validation.held_out.tapered_steps for validation in validations]
    rows = [
        (title, *(interval(getattr(loss, name, None), factor) for loss in losses)) for title, name, factor in METRICS
    ]
    for title, name, factor in (("NLL at full depth, nats", "nll", 1), ("repeated 4-grams, %", "repetition", 100)):
        pairs = (getattr(validation.free_running, name) for validation in validations)
        rows.append((title, *(interval(pair.policy, factor) for pair in pairs)))
    solved = [validation.problems.policy for validation in validations if validation.problems]
    if len(solved) == len(validations):
        rows.append(("word problems solved, %", *(interval(share, 100) for share in solved)))
    print_table(("held-out, 95 % intervals", "before", "after"), rows)
