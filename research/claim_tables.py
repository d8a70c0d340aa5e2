"""The tables of the paper's claims, from their figures, and the rules of the verdicts; `render_claims.py` uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pages import table

from taper.calibration.statistics import Estimate
from taper.calibration.summary import interval
from taper.evals.methods import FULL

Json = dict[str, Any]
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be told"
LEAST_SAVED = 0.05  # share of KL; a start of each task's own that saves less than this is of no use


def above_zero(estimate: Sequence[float] | None) -> str:
    """Whether a figure is above zero: by its whole 95 % interval."""
    if estimate is None:
        return UNKNOWN
    _, low, high = estimate
    return HOLDS if low > 0 else FAILS if high < 0 else UNKNOWN


def below_zero(estimate: Sequence[float] | None) -> str:
    """The same, the other way round."""
    return {HOLDS: FAILS, FAILS: HOLDS, UNKNOWN: UNKNOWN}[above_zero(estimate)]


def all_of(verdicts: Iterable[str]) -> str:
    """Of a claim in several parts: it holds if all do, and does not if one does not."""
    different = set(verdicts)
    return FAILS if FAILS in different else HOLDS if different == {HOLDS} else UNKNOWN


def curves_verdict(figures: Json) -> str:
    """Power-law decay against every other curve."""
    return all_of(above_zero(row["kl_above_power"]) for row in figures["curves"].values() if "kl_above_power" in row)


def accuracy_verdict(task: Json, order: str) -> str:
    """The test of non-inferiority."""
    verdicts = {"holds": HOLDS, "fails": FAILS, "not enough problems": UNKNOWN}
    compared = task["scores"][order]["against_full"]
    return UNKNOWN if compared is None else verdicts[compared["verdict"]]


def length_verdict(figures: Json) -> str:
    """Whether the clock's speedup is larger at the longest output than at the shortest, by all rounds."""
    (_, low, high), (_, low_long, high_long) = (figures["rows"][end]["by_clock"] for end in (0, -1))
    return HOLDS if low_long > high else FAILS if high_long <= low else UNKNOWN


def start_verdict(figures: Json) -> str:
    """Whether a start of each task's own is better than one for all."""
    _, low, high = figures["saved_by_own_start"]
    return HOLDS if low > 0 else FAILS if high < LEAST_SAVED else UNKNOWN


def _figure(estimate: Sequence[float] | None, factor: float = 1.0, digits: int | None = None) -> str:
    return interval(None if estimate is None else Estimate(*estimate), factor, digits=digits)


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[1]}"


def perplexity_tables(f: Json) -> list[str]:
    rows = [
        (_span(r["steps"]), str(r["outputs"]), _figure(r["nll"]), _figure(r["kl"]), _figure(r["disagreement"], 100))
        for r in f["rows"]
    ]
    titles = {"nll": "NLL at full depth", "kl": "KL of skipping", "disagreement": "other likeliest token, share"}
    changes = [(title, str(f["answers"]), _figure(f["change"][name])) for name, title in titles.items()]
    if "human" in f:
        changes.append(("NLL of people's solutions", str(f["human"]["answers"]), _figure(f["human"]["nll"])))
    columns = ("steps", "answers that long", "NLL at full depth, nats", "KL of skipping, nats", "other token, %")
    return [
        f"Skipping means {f['depth']} layers at every step. Long answers alone reach the last rows.",
        "",
        *table(columns, rows),
        "",
        "The second half of each answer less its first half:",
        "",
        *table(("figure", "answers", "change"), changes),
    ]


def perplexity_verdicts(f: Json) -> dict[str, str]:
    verdicts = {"perplexity falls along full depth's answers": below_zero(f["change"]["nll"])}
    if "human" in f:
        verdicts["perplexity falls along people's solutions"] = below_zero(f["human"]["nll"])
    return verdicts | {"skipping costs less at later steps (KL)": below_zero(f["change"]["kl"])}


def curves_tables(f: Json) -> list[str]:
    rows = []
    for name, row in f["curves"].items():
        above = _figure(row.get("kl_above_power")) if "kl_above_power" in row else ""
        rows.append((name, f"{row['mean_depth']:.2f}", _figure(row["kl"]), above, _figure(row["agreement"], 100)))
    columns = ("curve", "mean depth", "KL, nats", "above power-law, nats", "same likeliest token, %")
    return [f"Over {f['steps']:,} steps of {f['answers']} answers:", "", *table(columns, rows)]


def core_tables(f: Json) -> list[str]:
    role = {layer: name for name in ("head", "tail") for layer in f[name]["layers"]}
    rows = [
        (str(number), role.get(number, ""), _figure(layer["kl"]), _figure(layer["above_middle"]))
        for number, layer in enumerate(f["layers"])
    ]
    columns = ("layer", "part", "KL without it, nats", "above the mean of the middle, nats")
    blocks = [(name, _figure(f[name]["above_middle"])) for name in ("head", "tail")]
    cheap = ", ".join(str(layer) for layer in sorted(role) if f["layers"][layer]["above_middle"][2] < 0)
    note = f"Skipped alone, some layers of the head or tail cost less than the mean of the middle: {cheap}."
    return [
        *table(("part", "mean KL above that of the middle, nats"), blocks),
        "",
        *([note, ""] if cheap else []),
        f"Layer by layer, over {f['steps']:,} steps of {f['answers']} answers:",
        "",
        *table(columns, rows),
    ]


def core_verdicts(f: Json) -> dict[str, str]:
    return {
        f"the {name} matters more than the middle": above_zero(f[name]["above_middle"]) for name in ("head", "tail")
    }


def nesting_tables(f: Json) -> list[str]:
    spans = [_span(row["steps"]) for row in next(iter(f["rules"].values()))["rows"]]
    rows = []
    for name, rule in f["rules"].items():
        by_step = [f"{row['kl'][0]:.2f}" for row in rule["rows"]]
        rows.append((name, _figure(rule["kl"]), _figure(rule["agreement"], 100), *by_step))
    free = [
        (name, *(_figure(own[figure]["policy"]) for figure in ("nll", "length", "repetition")))
        for name, own in f["free"].items()
    ]
    full = next(iter(f["free"].values()))
    free.append(("full depth", *(_figure(full[figure]["full"]) for figure in ("nll", "length", "repetition"))))
    return [
        f"All at mean depth {f['mean_depth']:.2f}, over {f['steps']:,} steps of {f['answers']} answers:",
        "",
        *table(("rule", "KL, nats", "same likeliest token, %", *(f"KL, steps {span}" for span in spans)), rows),
        "",
        *table(
            ("paired difference of KL, nats", "value"),
            [
                ("rotating less nested", _figure(f["kl_above_nested"])),
                ("rotating less rotating, filled in", _figure(f["kl_of_missing"])),
            ],
        ),
        "",
        "Answers written freely, as full depth judges them:",
        "",
        *table(("rule", "NLL under full depth, nats", "tokens", "share of repeated 4-grams"), free),
    ]


def nesting_verdicts(f: Json) -> dict[str, str]:
    return {
        "a rule that is not nested is worse": above_zero(f["kl_above_nested"]),
        "missing keys and values are the reason": above_zero(f["kl_of_missing"]),
    }


def accuracy_tables(f: Json) -> list[str]:
    rows = []
    for task, result in f["tasks"].items():
        for order, score in result["scores"].items():
            compared = score["against_full"]
            difference = "" if compared is None else _figure(compared["difference"], 100, 1)
            figures = (f"{score['mean_depth']:.1f}", _figure(score["accuracy"], 100, 1), difference)
            rows.append((task, str(result["problems"]), order, *figures))
    columns = ("task", "problems", "layers", "mean depth, its own answers", "solved, %", "difference, points")
    return table(columns, rows)


def accuracy_in_short(model: Json, task: str, order: str) -> str:
    f, name, layers = model["accuracy"], model["model"]["name"], model["model"]["num_hidden_layers"]
    scores, problems = f["tasks"][task]["scores"], f["tasks"][task]["problems"]
    full, tapered = (_figure(scores[kind]["accuracy"], 100, 1) for kind in (FULL, order))
    return f"""At full depth, {name} solves {full} % of {problems} problems; at a mean depth of {f["depth"]:.1f} of its
        {layers} layers, {tapered} %, although the layers to skip were chosen by measurement."""


def accuracy_verdicts(f: Json) -> dict[str, str]:
    return {
        f"{name}, {order}": accuracy_verdict(task, order)
        for name, task in f["tasks"].items()
        if name in ("gsm8k", "BBH")
        for order in task["scores"]
        if order != FULL
    }


def length_tables(f: Json) -> list[str]:
    rows = [
        (str(row["tokens"]), f"{row['by_layers']:.2f}x", f"{row['by_bytes']:.2f}x", _figure(row["by_clock"], digits=2))
        for row in f["rows"]
    ]
    columns = ("tokens of an output", "by layers", "by bytes read", "by the clock (slowest to fastest round)")
    return table(columns, rows)


def start_tables(f: Json) -> list[str]:
    parts = list(next(iter(f["tasks"].values())))
    rows = [
        (task, *(f"{row['kl'][0]:.3f} ({row['start']})" if row else "" for row in (starts.get(part) for part in parts)))
        for task, starts in f["tasks"].items()
    ]
    return [
        "Mean KL in nats, and the start in tokens, by the start in median answers of the task:",
        "",
        *table(("task", *parts), rows),
        "",
        f"Own starts save {_figure(f['saved_by_own_start'], 100, 1)} % of the KL of the best common start.",
    ]
