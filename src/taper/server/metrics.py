"""What the server counts, for Prometheus: GET /metrics. docs/grafana.json draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import prometheus_client as prometheus

from ..engine import Engine
from ..engine.drafting import MAX_TOKENS
from ..stream import Chunk

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Counters and gauges of one server, in a registry of its own; the library adds `_total` to counters' names.

    The gauges show what the engine does when they are read.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = prometheus.CollectorRegistry()
        histogram = partial(prometheus.Histogram, buckets=_SECONDS, registry=registry)
        counter = partial(prometheus.Counter, registry=registry)
        self._ttft = histogram("taper_time_to_first_token_seconds", "From request to first token")
        self._tpot = histogram(
            "taper_time_per_output_token_seconds", "Mean time of a token after the first, by completion"
        )
        self._step = histogram("taper_step_seconds", "A step of the engine")
        self._prompt_tokens = counter("taper_prompt_tokens", "Tokens of prompts")
        self._cached_prompt_tokens = counter(
            "taper_cached_prompt_tokens", "Tokens of prompts that were not computed again"
        )
        self._completion_tokens = counter("taper_completion_tokens", "Tokens of completions")
        self._drafted = counter("taper_drafted_tokens", "Tokens that were proposed and verified")
        self._accepted = counter("taper_accepted_tokens", "Tokens of completions that had been proposed")
        self._layers_run = counter("taper_layers_run", "Layers run for tokens of completions")
        self._layers_skipped = counter("taper_layers_skipped", "Layers skipped for tokens of completions")
        self._mean_depth = prometheus.Summary("taper_mean_depth", "Mean depth, by completion", registry=registry)
        self._completions = counter("taper_completions", "Finished completions", ["finish_reason"])
        self._requests = counter("taper_requests", "HTTP requests", ["path", "status"])
        self._errors = counter("taper_errors", "HTTP requests that failed", ["status"])
        self._disconnects = counter("taper_disconnects", "Clients that left before the end")

        slots, context = engine.slots, engine.backend.context_length
        self._num_hidden_layers = engine.backend.config.num_hidden_layers

        def tokens() -> int:
            running = [sequence for sequence in list(slots.sequences) if sequence]
            return sum(sequence.num_tokens for sequence in running) + sum(map(len, list(slots.kept)))

        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "taper_waiting_sequences": ("Sequences that wait for a slot", lambda: engine.num_waiting),
            "taper_running_sequences": ("Sequences that run", lambda: len(slots.sequences) - slots.num_free),
            "taper_slots": ("Sequences that can run at a time", lambda: len(slots.sequences)),
            "taper_kv_cache_tokens": ("Tokens in the key-value cache, kept prompts included", tokens),
            "taper_kv_cache_capacity_tokens": ("Tokens that fit the cache", lambda: len(slots.sequences) * context),
        }
        planner = engine.planner
        gauges |= {
            "taper_draft_seconds": ("Time of forwards that proposed tokens", lambda: planner.draft_seconds),
            "taper_verify_seconds": ("Time of forwards that verified proposed tokens", lambda: planner.verify_seconds),
        }
        for name, (text, value) in gauges.items():
            prometheus.Gauge(name, text, registry=registry).set_function(value)

        for name, counts in (("verified", planner.num_verified), ("accepted", planner.num_accepted)):
            text = f"Proposed tokens that were {name}, by their place in a draft"
            gauge = prometheus.Gauge(f"taper_{name}_by_place", text, ["place"], registry=registry)
            for place in range(MAX_TOKENS):
                gauge.labels(str(place + 1)).set_function(partial(counts.__getitem__, place))

    def count_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Count a step of the engine and the chunks it made, stop tokens included."""
        layers_run = sum(chunk.depth for chunk in chunks)
        self._step.observe(seconds)
        self._completion_tokens.inc(len(chunks))
        self._layers_run.inc(layers_run)
        self._layers_skipped.inc(self._num_hidden_layers * len(chunks) - layers_run)
        for output in (chunk.output for chunk in chunks if chunk.output is not None):
            self._completions.labels(output.finish_reason).inc()
            self._prompt_tokens.inc(output.prompt_tokens)
            self._cached_prompt_tokens.inc(output.cached_tokens)
            self._drafted.inc(output.drafted_tokens)
            self._accepted.inc(output.accepted_tokens)
            self._mean_depth.observe(output.mean_depth)
            self._ttft.observe(output.ttft_s)
            if output.tokens_per_second:
                self._tpot.observe(1 / output.tokens_per_second)

    def count_request(self, path: str, status: int) -> None:
        """Count a request that was answered."""
        self._requests.labels(path, str(status)).inc()
        if status >= 400:
            self.count_error(status)

    def count_error(self, status: int) -> None:
        """Count a request that failed, or a stream that began with status 200 and ended with an error."""
        self._errors.labels(str(status)).inc()

    def count_disconnect(self) -> None:
        """Count a client that left."""
        self._disconnects.inc()

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        text: bytes = prometheus.generate_latest(self._registry)
        return text
