"""`taper policy list` and `taper policy show`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..policy import DepthPolicy


@click.group()
def policy() -> None:
    """Look at depth policies."""


@policy.command("list")
def policy_list() -> None:
    """The policies that come with Taper."""
    from rich.table import Table

    from ..policies import shipped_policies
    from ..terminal import console

    table = Table("model", "policy", "curve", "mean depth, 128 tokens", "least", "measured", box=None)
    for model, policies in sorted(shipped_policies().items()):
        for policy in policies:
            mean = f"{policy.mean_depth(128):.1f} of {policy.num_hidden_layers}"
            schedule = policy.schedule
            numbers = schedule.curve if schedule.alpha is None else f"{schedule.curve}, alpha {schedule.alpha}"
            table.add_row(model, policy.name, numbers, mean, str(policy.min_depth), _measured(policy))
    console(stderr=False).print(table)


@policy.command("show")
@click.argument("name", metavar="NAME|FILE")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=128, help="Length of output.")
@click.option("--json", "as_json", is_flag=True, help="Print the policy's JSON.")
def policy_show(name: str, tokens: int, as_json: bool) -> None:
    """Draw the depth of each step of a policy, and the layers it skips."""
    from ..policies import find_policy

    policy = find_policy(name)
    if as_json:
        click.echo(policy.to_json(), nl=False)
        return
    from ..terminal import policy_picture

    click.echo(f"{policy.label}: mean depth {policy.mean_depth(tokens):.1f} of {policy.num_hidden_layers} layers\n")
    click.echo(policy_picture(policy, tokens))
    click.echo(f"measured when it was made: {_measured(policy)}")


def _measured(policy: DepthPolicy) -> str:
    """What its provenance says of speed and quality; users may have written anything there."""
    with suppress(KeyError, TypeError, IndexError, ValueError):
        speed = policy.provenance["speedup"]["measured"][0]
        agreement = policy.provenance["held_out"]["tapered steps"]["agreement"][0]
        return f"{speed:.2f}x, {agreement:.0%} same tokens"
    return "nothing"
