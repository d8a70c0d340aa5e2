"""What calibration found, as tables for README.md and docs; `render.py` puts them there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pages import prose, table

from taper.calibration.summary import MEASURED_ORDER, interval
from taper.models.download import DEFAULT_MODEL

ROOT = Path(__file__).parent.parent


def shipped(model: str) -> dict[str, Any]:
    """The provenance of each policy that comes with Taper for a model; its fields are attributes."""
    files = sorted((ROOT / "src" / "taper" / "policies" / model).glob("*.json"))
    return {file.stem: fields(json.loads(file.read_text())["provenance"]) for file in files}


def fields(data: Any) -> Any:
    """JSON whose fields are attributes; `problems`, which not every model has, is None where it is missing."""
    return json.loads(json.dumps({"problems": None} | data), object_hook=lambda given: SimpleNamespace(**given))


def tapered(provenance: Any) -> Any:
    """The loss over tapered steps, which every published policy has."""
    return getattr(provenance.held_out, "tapered steps")


def speed(provenance: Any) -> str:
    """The measured speed, times that of full depth."""
    return f"{provenance.speedup.measured[0]:.2f}x"


def deepest_first(model: str) -> list[tuple[str, Any]]:
    """The policies that come with Taper for a model, by name."""
    return sorted(shipped(model).items(), key=lambda item: -item[1].mean_depth)


def fewer_solved(models: Iterable[str]) -> str:
    """A sentence on the policies that solve fewer word problems than full depth, by more than chance explains."""
    fewer = []
    for model in models:
        names = [f"`{name}`" for name, p in deepest_first(model) if p.problems and p.problems.difference[2] < 0]
        if names:
            fewer.append(f"{' and '.join(names)} of {model}")
    if not fewer:
        return "No policy solves fewer word problems than full depth by more than chance explains."
    all_of_them = ", and with ".join(fewer)
    return f"By more than chance explains, fewer word problems than at full depth are solved with {all_of_them}."


# What is told of a policy, and what it means.
FIGURES: list[tuple[str, Callable[[Any], str]]] = [
    ("mean depth", lambda p: f"{p.mean_depth:.1f}"),
    ("speed, predicted", lambda p: f"{p.speedup.predicted:.2f}x"),
    ("speed, measured", speed),
    ("KL to full depth, nats", lambda p: interval(tapered(p).kl, digits=2)),
    ("same likeliest token as full depth, %", lambda p: interval(tapered(p).agreement, 100, digits=0)),
    ("rise in NLL of full depth's outputs, %", lambda p: interval(tapered(p).nll_increase, digits=0)),
    ("NLL of the policy's own outputs, nats", lambda p: interval(p.free_running.nll.policy, digits=2)),
    ("NLL of full depth's own outputs, nats", lambda p: interval(p.free_running.nll.full, digits=2)),
    ("repeated 4-grams, policy, %", lambda p: interval(p.free_running.repetition.policy, 100, digits=0)),
    ("repeated 4-grams, full depth, %", lambda p: interval(p.free_running.repetition.full, 100, digits=0)),
    ("word problems solved, policy, %", lambda p: interval(p.problems and p.problems.policy, 100, digits=0)),
    ("word problems solved, full depth, %", lambda p: interval(p.problems and p.problems.full, 100, digits=0)),
]
LEGEND = prose(
    """
    KL, likeliest token and rise in NLL compare the policy with full depth at the steps that run fewer layers, on
    outputs that full depth wrote. The rows after them are about outputs that the policy and full depth wrote freely:
    how unlikely the full model finds them, how much they repeat themselves, and how many of 64 short problems get the
    right answer. Brackets hold 95 % intervals.
    """
)


def quality(calibrated: dict[str, Any]) -> list[str]:
    """What the shipped policies cost, what calibration takes, and the order of layers beside others'."""
    policies, first = deepest_first(DEFAULT_MODEL), calibrated["policies"]["fast"]
    minutes = {name: f"{data['seconds'] / 60:.1f}" for name, data in calibrated["policies"].items()}
    c = first["conditions"]
    lines = [
        prose(
            """
            These figures are from held-out prompts, with outputs of up to 128 tokens;
            [calibration](../../docs/calibration.md)
            explains how they are measured. They come from the built-in prompts and this command:
            """
        ),
        "",
        "    python research/calibration.py --cache FOLDER policies orders growth",
        "",
        *figures_table(policies),
        "",
        LEGEND,
        "",
        prose(
            """
            All three policies visibly change the text of this small model. There is also a page about a larger one,
            [Qwen2.5-Coder-1.5B-Instruct](qwen2.5-coder-1.5b-instruct/README.md).
            """
        ),
        "",
        "### How long calibration takes",
        "",
        *table(
            ("policy", "starts from", "minutes"),
            [
                ("`fast`", "cached outputs" if first.get("resumed") else "an empty cache", minutes["fast"]),
                ("`balanced`", "cached outputs", minutes["balanced"]),
                ("`gentle`", "cached outputs", minutes["gentle"]),
            ],
        ),
        "",
        prose(
            f"""
            Memory peaked at {first["peak_mib_so_far"]} MiB. Measured on {c["date"]} on an {c["machine"]}, with
            {c["threads"]} threads, Taper {c["taper"]} and Python {c["python"]}.
            """
        ),
    ]
    if "growth" in calibrated:
        growth = calibrated["growth"]
        rows = [(str(row["prompts"]), str(row["tokens"]), f"{row['seconds']:.0f}") for row in growth["rows"]]
        lines += [
            "",
            prose(
                """
                The word problems take a part of this that is the same for all prompts. The rest grows with the tokens
                of prompts and outputs. From empty caches, with outputs of up to 24 tokens:
                """
            ),
            "",
            *table(("prompts", "tokens", "seconds"), rows),
            "",
            prose(
                f"""
                A straight line through these times starts at {growth["fixed_seconds"]:.0f} s and rises by
                {growth["seconds_per_1000_tokens"]:.0f} s for each 1000 tokens (R² {growth["r_squared"]:.3f}). Above
                72 prompts it rises more slowly, because the search then has all the prompts that it uses.
                """
            ),
        ]
    return lines + (orders(calibrated["orders"]) if "orders" in calibrated else [])


def orders(measured: dict[str, Any]) -> list[str]:
    """KL by depth, a column for each method, and how it differs from the measured order's."""
    kl, above = measured["kl"], measured["kl_above_measured_order"]
    others = [method for method in kl if method != MEASURED_ORDER]
    include_zero = [
        f"- {method}: {', '.join(by_depth)} layers" for method, by_depth in measured["not_clear_of_zero"].items()
    ]
    values = [(depth, *(f"{kl[method][depth][0]:.2f}" for method in kl)) for depth in kl[MEASURED_ORDER]]
    differences = [
        (depth, *(_difference(above.get(method, {}).get(depth)) for method in others)) for depth in kl[MEASURED_ORDER]
    ]
    return [
        "",
        "### Which layers to skip: the measured order and others",
        "",
        prose(
            f"""
            These tables compare orders of skipping layers, each at the same depth from step 1 on, by their mean KL
            to full depth over {measured["steps"]} steps of {measured["answers"]} held-out outputs. SkipDecode decays
            linearly and has that depth on average. `first sketch` is the order that an early version of this search
            found on other outputs of the same model.
            """
        ),
        "",
        "Mean KL to full depth, nats:",
        "",
        *table(("layers", *kl), values),
        "",
        prose(
            """
            How much higher that is than with the measured order, as a 95 % interval of the paired difference. A cell
            is empty where both skip the same layers:
            """
        ),
        "",
        *table(("layers", *others), differences),
        "",
        "The 95 % interval of the difference includes zero for:",
        "",
        *(include_zero or ["- no method"]),
        "",
        prose(
            """
            So on this model the measured order is far better than early exit, SkipDecode, evenly spread layers and
            random orders. It cannot be distinguished from ShortGPT's order, nor at most depths from skipping the
            middle first: KL has a heavy tail, and a few outputs account for much of it. Note that ShortGPT's block
            influence was computed on the very outputs that are compared here, and the measured order on others.
            """
        ),
    ]


def _difference(estimate: Sequence[float] | None) -> str:
    """The interval of a difference; nothing where there is none."""
    return "" if estimate is None else f"{estimate[1]:+.2f} to {estimate[2]:+.2f}"


def model_page(model: str, calibrated: dict[str, Any]) -> str:
    """The page of a larger model: what its shipped policies cost, and in which order layers are skipped."""
    policies, measured = deepest_first(model), calibrated["policies"]
    some = shipped(model)["balanced"]
    order, kls = measured["fast"]["skip_order"], measured["fast"]["frontier"]["kl"][MEASURED_ORDER].values()
    minutes = {name: f"{data['seconds'] / 60:.0f}" for name, data in measured.items()}
    timing = (
        "The calibration went on from an interrupted one, so its time says nothing."
        if measured["fast"].get("resumed")
        else f"`fast` took {minutes['fast']} minutes from an empty cache, `balanced` {minutes['balanced']} and "
        f"`gentle` {minutes['gentle']} after it."
    )
    c = some.conditions
    lines = [
        f"# {model}",
        "",
        prose(
            f"""
            What the policies that come with Taper for this model save and cost. Full depth is
            {some.model.num_hidden_layers} layers. The search used {some.prompts.search} of the built-in prompts. The
            figures below are from {some.prompts.held_out} held-out ones, with outputs of up to {some.answer_tokens}
            tokens; [calibration](../../../docs/calibration.md)
            explains how they are measured. [The report](report/index.html)
            explains `balanced`, with pictures. This command made all of it:
            """
        ),
        "",
        f"    python research/calibration.py --cache FOLDER --model {model} policies",
        "",
        *figures_table(policies),
        "",
        LEGEND,
        "",
        "## Which layers are skipped first",
        "",
        "The mean KL to full depth as one layer after another is skipped, on the prompts of the search:",
        "",
        *table(
            ("layers skipped", "the last of them", "KL, nats"),
            [(str(n), str(layer), f"{kl:.2f}") for n, (layer, kl) in enumerate(zip(order, kls, strict=False), 1)],
        ),
        "",
        prose(
            f"""
            Measured on {c.date}, on an {c.machine}, with {c.threads} threads, Taper {c.taper} and Python {c.python}.
            {timing} The weights were used as they are in the file (sha256 {some.model.sha256[:16]}...).
            """
        ),
    ]
    return "\n".join([*lines, ""])


def figures_table(policies: Sequence[tuple[str, Any]]) -> list[str]:
    """What policies save and cost, a column for each."""
    return table(
        ("figure", *(f"`{name}`" for name, _ in policies)),
        [(title, *(cell(policy) for _, policy in policies)) for title, cell in FIGURES],
    )
