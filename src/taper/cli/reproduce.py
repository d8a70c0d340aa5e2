"""`taper reproduce`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from ..models import model_name
from .common import check_report, load, run_options, say, stages
from .eval import listed

if TYPE_CHECKING:
    from ..llm import LLM
    from ..policy import DepthPolicy


@click.command()
@click.argument("model")
@run_options
@click.option(
    "--tasks",
    default="gsm8k,bbh_cot_fewshot",
    metavar="NAMES",
    help="Tasks of lm-evaluation-harness, or groups of them.",
)
@click.option("--data-dir", type=Path, metavar="FOLDER", help="Data of GSM8K and BBH. Default: the Hugging Face hub.")
@click.option("--limit", type=int, metavar="N", help="Only the first N problems of each task.")
@click.option("--fewshot", type=int, metavar="N", help="Examples before each problem. Default: the task's own number.")
@click.option("--chat/--no-chat", default=False, help="Ask by the model's chat template.")
@click.option("--lengths", default="128,512", metavar="TOKENS", help="Most tokens of an output, one run for each.")
@click.option("--policy", metavar="POLICY", help="Name or file of a policy, instead of calibrating one.")
@click.option("--min-agreement", type=float, help="Budget of the calibration. Default: 0.95.")
@click.option("--baselines", is_flag=True, help="Compare every method that Taper knows. Takes long.")
@click.option("--margin", type=float, default=0.01, help="Loss of accuracy that you accept, between 0 and 1.")
@click.option("--batch-size", type=click.IntRange(3), default=16, help="Outputs generated at a time.")
@click.option("--out", type=Path, metavar="FOLDER", help="Outputs, results and report. Default: reproduce-MODEL.")
def reproduce(
    model: str,
    tasks: str,
    lengths: str,
    policy: str | None,
    min_agreement: float | None,
    batch_size: int,
    out: Path | None,
    **options: Any,
) -> None:
    """Repeat the paper's experiment on MODEL: is it as accurate on GSM8K and BBH with 1.5 times fewer layers?

    Calibrates a policy, compares methods with full depth at the mean depth of the paper and at that of the policy,
    times them, and writes results.json and a page with pictures. Takes hours on a CPU unless --limit is small. The same
    command continues an interrupted run.
    """
    from ..lab.evals import load_tasks
    from ..lab.evals.summary import check_comparison

    if policy is not None and min_agreement is not None:
        raise RequestError("--min-agreement does nothing with --policy", "leave out one of the two")
    try:
        max_tokens = [int(length) for length in lengths.split(",")]
    except ValueError:
        raise RequestError(f"--lengths is {lengths!r}; it must be whole numbers with commas between them") from None
    out = out or Path(f"reproduce-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', model_name(model))}")
    check_report("--out", out)
    from ..lab.evals.reproduce import check_numbers
    from ..lab.evals.reproduce import reproduce as run  # needs matplotlib

    selection = load_tasks(listed("tasks", tasks), fewshot=options["fewshot"], data_dir=options["data_dir"])
    check_comparison(selection, options["margin"], None)
    llm = load({**options, "model": model}, max_batch_size=batch_size)
    check_numbers(llm, max_tokens, options["limit"])
    order, chosen, budget = _policy(llm, policy, 0.95 if min_agreement is None else min_agreement)
    given = {name: options[name] for name in ("limit", "chat", "margin", "baselines")}
    run(llm, selection, order, chosen, out, budget=budget, lengths=max_tokens, log=say, **given)
    say(f"report: {out / 'index.html'}")


def _policy(llm: LLM, policy: str | None, min_agreement: float) -> tuple[list[int], DepthPolicy | None, str]:
    """The measured order, the policy for the budget if one meets it, and where it comes from."""
    from ..lab.calibration.run import calibrate

    if policy is not None:
        given = llm.resolve_policy(policy)
        return list(given.skip_order), given, f"the policy {given.label}"
    with stages() as progress:
        result = calibrate(llm, min_agreement=min_agreement, progress=progress)
    budget = f"agreement with full depth of {100 * min_agreement:g} % over tapered steps, on the built-in prompts"
    if not result.met:
        say(f"no policy meets the budget: {budget}")
        return result.summary.skip_order, None, budget
    return result.summary.skip_order, result.policy, f"the fastest one that was found for an {budget}"
