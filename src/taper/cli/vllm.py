"""`taper vllm-args`."""

from __future__ import annotations

import shlex

import click


@click.command("vllm-args")
@click.option("--policy", required=True, metavar="NAME|FILE", help="The policy of requests that name none.")
@click.option("--allow", multiple=True, metavar="NAME|FILE", help="A policy that requests may name; repeatable.")
@click.option("--architecture", metavar="NAME", help="The model_type in config.json. Default: the policy's.")
def vllm_args(policy: str, allow: tuple[str, ...], architecture: str | None) -> None:
    """Print the flags that make `vllm serve` use a policy."""
    from pathlib import Path

    from ..policies import find_policy
    from ..vllm_plugin import args

    named = {Path(name).stem: find_policy(name) for name in allow}
    click.echo(shlex.join(args.vllm_args(find_policy(policy), named, architecture)))
