"""The tables of research/results/serve_speed.json and serve_load.json, for docs/results.md; `render.py` has them."""

from __future__ import annotations

from typing import Any

from pages import prose, table


def section(speed: dict[str, Any] | None, load: dict[str, Any] | None) -> list[str]:
    """The section of docs/results.md; it has what was measured."""
    lines = [*(_speeds(speed) if speed else []), *(_load(load) if load else [])]
    return ["## Serving", "", *lines] if lines else []


def _speeds(result: dict[str, Any]) -> list[str]:
    c, batch, tapered = result["conditions"], result["conditions"]["batch"], result["taper_over_full"]
    names = {"full": "Taper, full depth", "taper": f"Taper, `{c['policy']}`", "llama_server": "llama-server"}
    named = {key: title for key, title in names.items() if f"{key} 1" in result["tokens_per_second"]}
    rows = [
        (
            title,
            *(f"{result['tokens_per_second'][f'{key} {count}']['whole']:.0f}" for count in (1, batch)),
            *(f"{result['ttft_s'][f'{key} {n}']:.2f}" if f"{key} 0" in result["ttft_s"] else "" for n in (0, batch)),
        )
        for key, title in named.items()
    ]
    columns = ("tokens/s, 1 stream", f"tokens/s, {batch} streams", "first token, idle, s", "first token, busy, s")
    over = result.get("full_over_llama_server")
    beside = f" It is {over[f'whole {batch}']:.2f}x as fast as llama-server at full depth." if over else ""
    return [
        prose(
            f"""
            `taper serve` with the default model and {batch} streams at a time. The first token is that of a prompt of
            {c["newcomer_prompt_tokens"]} tokens which comes to an idle server, or to one with {batch} streams. These
            figures come from `research/results/serve_speed.json`, which this command makes:
            """
        ),
        "",
        "    python research/serve_speed.py --llama-bin DIR --out research/results/serve_speed.json",
        "",
        *table(("server", *columns), rows),
        "",
        prose(
            f"""
            {batch} streams make {result["streams_over_one"]:.2f} times the tokens of one at a time.{beside} Tapered
            streams decode {tapered["measured"]:.2f} times as fast as those at full depth, where their FLOPs would let
            them be {tapered["ideal_by_flops"]:.2f} times as fast. A newcomer waits
            {result["ttft_under_load_over_idle"]:.2f} times as long for its first token as it would on an idle server.
            Measured on {c["date"]} at commit {c["commit"]}, on an {c["cpu"]} with {c["cores"]} cores and {c["threads"]}
            threads: prompts of {c["prompt_tokens"]} tokens, outputs of {c["answer_tokens"]}, medians of {c["rounds"]}
            rounds in which everything took turns. The client ran on the same cores.
            """
        ),
        "",
    ]


def _load(result: dict[str, Any]) -> list[str]:
    c, load, restart = result["conditions"], result["load"], result["restart_after_kill_s"]
    counts, memory = load["counts"], load["rss_mib"]
    left = counts["leave stream"] + counts["leave json"] + counts["silent"]
    return [
        prose(
            f"""
            Under mixed load for {load["seconds"] / 60:.0f} minutes: {c["clients"]} clients asked for answers of random
            lengths under three policies, left in the middle ({left:,} times, the ones that never read included), and
            sent what is no request ({counts["bad request"] + counts["not a request"]:,} times). The queue was short on
            purpose: {counts["queue full"]:,} requests were told that it was full. Weights and key-value
            cache were f32, so that each of the {counts["right answers"]:,} answers could be compared with the one that
            the model gives alone: {len(load["wrong"])} differed. {load["stuck_sequences"]} sequences were stuck at the
            end. Memory was {memory["first_tenth"]} MiB in the first tenth of the time and {memory["last_tenth"]} in the
            last. SIGTERM under load lost {result["sigterm"]["accepted"] - result["sigterm"]["answered"]} of
            {result["sigterm"]["accepted"]} accepted requests. After `kill -9`, a new server was ready in
            {restart["ready"]:.1f} s and gave its first answer {restart["first_answer"]:.1f} s later (median of
            {restart["restarts"]}, {_threads(restart["threads"])}, {restart["date"]}, commit {restart["commit"]}).
            """
        ),
        "",
        "    python research/serve_load.py load restart --minutes 30 --out research/results/serve_load.json",
        "",
        prose(
            f"""
            Measured on {c["date"]} at commit {c["commit"]}, on an {c["cpu"]}, with {_threads(c["threads"])} and
            {c["batch"]} slots of {c["context"]} tokens.
            """
        ),
        "",
    ]


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"
