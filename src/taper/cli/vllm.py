"""`taper vllm-args`."""

from __future__ import annotations

import shlex

import click

from .common import find_policy


@click.command("vllm-args")
@click.option("--policy", required=True, metavar="NAME|FILE", help="Policy of requests that name none.")
@click.option("--allow", multiple=True, metavar="NAME|FILE", help="A policy that requests may name; may be repeated.")
@click.option("--architecture", metavar="NAME", help="llama, mistral, qwen2, qwen3. Default: the policy's model's.")
def vllm_args(policy: str, allow: tuple[str, ...], architecture: str | None) -> None:
    """Print the flags that make `vllm serve` taper."""
    from pathlib import Path

    from ..vllm_plugin import args

    named = {Path(name).stem: find_policy(name) for name in allow}
    click.echo(shlex.join(args.vllm_args(find_policy(policy), named, architecture)))
