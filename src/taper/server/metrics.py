"""What the server counts, for Prometheus: GET /metrics. docs/grafana.json draws it."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

from ..engine import Engine
from ..llm import Chunk

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Counters and gauges of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._ttft = Histogram(
            "taper_time_to_first_token_seconds", "From request to first token", buckets=_SECONDS, registry=registry
        )
        self._tpot = Histogram(
            "taper_time_per_output_token_seconds",
            "Mean time of a token after the first, by output",
            buckets=_SECONDS,
            registry=registry,
        )
        self._step = Histogram("taper_step_seconds", "A step of the engine", buckets=_SECONDS, registry=registry)
        self._prompt_tokens = Counter("taper_prompt_tokens", "Tokens of prompts", registry=registry)
        self._cached_tokens = Counter(
            "taper_cached_prompt_tokens", "Tokens of prompts that were not computed again", registry=registry
        )
        self._tokens = Counter("taper_output_tokens", "Tokens of outputs", registry=registry)
        self._layers_run = Counter("taper_layers_run", "Layers run for tokens of outputs", registry=registry)
        self._layers_saved = Counter("taper_layers_saved", "Layers skipped for tokens of outputs", registry=registry)
        self._depth = Summary("taper_mean_depth", "Mean depth, by output", registry=registry)
        self._outputs = Counter("taper_outputs", "Finished outputs", ["finish_reason"], registry=registry)
        self._requests = Counter("taper_requests", "HTTP requests", ["path", "status"], registry=registry)
        self._errors = Counter("taper_errors", "HTTP requests that failed", ["status"], registry=registry)
        self._disconnects = Counter("taper_disconnects", "Clients that left before the end", registry=registry)

    def watch(self, engine: Engine) -> None:
        """Show what an engine does at the moment."""
        slots, context = engine.slots, engine.backend.context_length
        self._num_hidden_layers = engine.backend.config.num_hidden_layers

        def tokens() -> int:
            running = [sequence for sequence in list(slots.sequences) if sequence]
            return sum(len(sequence.token_ids) for sequence in running) + sum(map(len, list(slots.kept)))

        gauges = {
            "taper_waiting_sequences": ("Sequences that wait for a slot", lambda: engine.num_waiting),
            "taper_running_sequences": ("Sequences that run", lambda: len(slots.sequences) - slots.num_free),
            "taper_slots": ("Sequences that can run at a time", lambda: len(slots.sequences)),
            "taper_kv_cache_tokens": ("Tokens in the key-value cache, kept prompts included", tokens),
            "taper_kv_cache_capacity_tokens": ("Its size", lambda: len(slots.sequences) * context),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self._registry).set_function(value)

    def count_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Count a step of the engine and what came out, stop tokens included."""
        layers, run = self._num_hidden_layers, sum(chunk.depth for chunk in chunks)
        self._step.observe(seconds)
        self._tokens.inc(len(chunks))
        self._layers_run.inc(run)
        self._layers_saved.inc(layers * len(chunks) - run)
        for output in (chunk.output for chunk in chunks if chunk.output is not None):
            self._outputs.labels(output.finish_reason).inc()
            self._prompt_tokens.inc(output.prompt_tokens)
            self._cached_tokens.inc(output.cached_tokens)
            self._depth.observe(output.mean_depth)
            self._ttft.observe(output.ttft_s)
            if output.tokens_per_second:
                self._tpot.observe(1 / output.tokens_per_second)

    def count_request(self, path: str, status: int) -> None:
        """Count a request that was answered."""
        self._requests.labels(path, str(status)).inc()
        if status >= 400:
            self.count_error(status)

    def count_error(self, status: int) -> None:
        """Count a request that failed, or a stream that ended with an error after it had begun with 200."""
        self._errors.labels(str(status)).inc()

    def count_disconnect(self) -> None:
        """Count a client that left."""
        self._disconnects.inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        return text
