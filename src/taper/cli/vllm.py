"""`taper vllm-args`."""

from __future__ import annotations

import shlex

import click


@click.command("vllm-args")
@click.option("--policy", required=True, metavar="NAME|FILE", help="Policy of requests that name none.")
@click.option("--allow", multiple=True, metavar="NAME|FILE", help="A policy that requests may name; may be repeated.")
@click.option("--architecture", metavar="NAME", help="llama, mistral, qwen2, qwen3. Default: the policy's model's.")
def vllm_args(policy: str, allow: tuple[str, ...], architecture: str | None) -> None:
    """Print the flags that make `vllm serve` taper."""
    from pathlib import Path

    from ..policy import DepthPolicy, load_policy, shipped_policies
    from ..vllm_plugin import args

    shipped = {found.name: found for policies in shipped_policies().values() for found in policies}

    def find(name: str) -> DepthPolicy:
        return shipped[name] if name in shipped else load_policy(name)

    named = {Path(name).stem: find(name) for name in allow}
    click.echo(shlex.join(args.vllm_args(find(policy), named, architecture)))
