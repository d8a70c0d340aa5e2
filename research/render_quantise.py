"""The tables of research/results/quantise.json, for docs/results.md and README.md; `render.py` puts them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pages import prose, table

from taper.calibration.statistics import Estimate
from taper.calibration.summary import interval

FILE, BF16 = "the file", "bf16"
LOSS = ("KL to f32, nats", "same likeliest token, %")


def adding_up(result: dict[str, Any]) -> list[str]:
    """Quantising, skipping layers, and both; speeds where they have been measured."""
    loss, speed = result["quality"]["loss"], result.get("speed")
    titles = {
        FILE: "the model file, full depth",
        f"{FILE}, balanced": "the model file, `balanced`",
        "iq4_nl": "`--dtype iq4_nl`, full depth",
        "iq4_nl, balanced": "`--dtype iq4_nl`, `balanced`",
    }
    columns = ["weights and depth", *LOSS]
    rows = [[title, *_losses(loss[name])] for name, title in titles.items()]
    if speed:
        columns.append("decoding")
        rows = [[*row, f"{speed['decode'][name]['ratio']:.2f}x"] for name, row in zip(titles, rows, strict=True)]
    return table(columns, rows)


def section(result: dict[str, Any]) -> list[str]:
    """The section of docs/results.md."""
    quality, c = result["quality"], result["quality"]["conditions"]
    types = list(quality["matrices"])
    held_in = {FILE: "q4_1, and q8_0 for the logits", BF16: "f16"}
    held_in |= {dtype: _counted(quality["matrices"][dtype]) for dtype in types}
    loss = [(name, held_in[name], *_losses(quality["loss"][name])) for name in (FILE, BF16, *types)]
    return [
        "## Quantising while loading",
        "",
        prose(
            """
            The default model was dequantised to a bf16 Hugging Face folder, and loaded from there with each
            `--dtype`. These figures come from `research/results/quantise.json`, which this command makes:
            """
        ),
        "",
        "    python research/quantise.py --out research/results/quantise.json quality speed",
        "",
        prose(
            f"""
            What is lost, compared with the same weights in f32, over {quality["steps"]} steps of
            {quality["answers"]} outputs that f32 wrote. Brackets hold 95 % intervals:
            """
        ),
        "",
        *table(("weights", "types of the matrices", *LOSS), loss),
        "",
        prose(
            """
            The row of the file shows what the kernels alone cost, because its weights are those of the folder but for
            rounding to bf16. The rows of 576 weights of this model are not whole blocks of q4_k and q6_k, so most of
            its matrices fall back to q5_0 and q8_0. Note also that its weights had been quantised to q4_1 before.
            Quantising a second time, to another grid of four bits, probably loses more than quantising original
            weights would, so q4_0 and iq4_nl may look worse here than they are.
            """
        ),
        "",
        *(_speeds(result["speed"], (FILE, BF16, *types)) if "speed" in result else ()),
        prose(
            """
            You can quantise and skip layers; the losses add up. The prompts of this table had no part in
            choosing the policy, but it was calibrated on the file as it is:
            """
        ),
        "",
        *adding_up(result),
        "",
        prose(
            f"""
            Losses were measured on {c["date"]} on an {c["machine"]}, with {c["threads"]} threads, Taper {c["taper"]}
            (commit {c["commit"]}), {c["kernels"]} and Python {c["python"]}.
            """
        ),
        "",
    ]


def _speeds(speed: dict[str, Any], names: Sequence[str]) -> list[str]:
    c = speed["conditions"]
    rows = [
        (
            name,
            *(f"{speed[figure][name]['ratio']:.2f}x" for figure in ("decode", "prefill")),
            *(f"{speed[figure][name]['tokens_per_second']:.0f}" for figure in ("decode", "prefill")),
            f"{speed['load_seconds'][name]:.1f}",
        )
        for name in names
    ]
    return [
        "What is gained. Ratios are to the file itself:",
        "",
        *table(("weights", "decoding", "prefill", "decoding, tokens/s", "prefill, tokens/s", "loading, s"), rows),
        "",
        prose(
            f"""
            Of these types, q4_0, q4_k and iq4_nl have a layout that this processor multiplies fastest; q5_0, which most
            matrices are in with `--dtype q4_k`, has none. iq4_nl searches long for the best scale of each block,
            which shows in the time of loading. These are medians of {c["rounds"]} rounds, in which everything
            alternated, measured on {c["date"]} on an {c["machine"]} with {c["threads"]} threads (commit {c["commit"]}).
            Decoding is over outputs of {c["answer_tokens"]} tokens, prefill is one forward over {c["prefill_tokens"]}
            tokens, batch size {c["batch"]}.
            """
        ),
        "",
    ]


def _losses(loss: dict[str, Any]) -> tuple[str, str]:
    return interval(Estimate(*loss["kl"])), interval(Estimate(*loss["agreement"]), 100, digits=0)


def _counted(matrices: dict[str, int]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in sorted(matrices.items(), key=lambda item: -item[1]))
