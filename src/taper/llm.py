"""Text in, text out: chat template, stop strings, streaming, counts and times around the engine."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .backends import Backend
from .engine import Engine, Request, Step
from .errors import PolicyError, RequestError, TaperWarning
from .loading import DEFAULT_MODEL, LoadedModel, Message, TextStream, Tokenizer, find_model, load_model
from .policy import DepthPolicy, load_policy, shipped_policies
from .sampling import SamplingParams, TokenLogprobs

Prompt = str | Sequence[Message]

MODES = ("full", "taper")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "f32", "f16", "bf16", "q8_0")
DEFAULT_CONTEXT = 4096
DEFAULT_POLICY = "balanced"


@dataclass(frozen=True)
class Output:
    """An answer and what it took.

    `token_ids` leaves out the stop id; `depths` has one entry for each of them, the first of them L.
    `mean_depth` is over steps from 1 on. `ttft_s`: seconds from the call to the first token. `tokens_per_second`:
    (n - 1) over the time from first to last token. Time that the caller spends between chunks is not counted.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    depths: list[int]
    mean_depth: float
    ttft_s: float
    tokens_per_second: float
    policy: DepthPolicy
    logprobs: list[TokenLogprobs] | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Chunk:
    """What one step added to the answer of prompt `index`. The last chunk of an answer carries its `output`."""

    index: int
    text: str
    token_id: int
    depth: int
    output: Output | None = None


class LLM:
    """A model ready to answer.

    Args:
        model: a name, a hub id that was pulled, a GGUF file or a Hugging Face folder.
        device: "cpu" (ggml), "cuda" (PyTorch), or "auto": cuda where PyTorch and a GPU are there.
        dtype: "f32", "f16", "bf16", "q8_0" to convert the weights; "auto" uses them as they are (bf16 as f16 on a CPU).
        context: tokens that prompt and answer may have together; default 4096, or the model's limit if lower.
        threads: CPU threads; default the cores this process may use.
        max_batch_size: answers generated at a time.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        RequestError: an option out of its range.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        context: int | None = None,
        threads: int | None = None,
        max_batch_size: int = 8,
    ) -> None:
        for what, value, allowed in (("device", device, DEVICES), ("dtype", dtype, DTYPES)):
            if value not in allowed:
                raise RequestError(f"{what} is {value!r}; it must be one of {', '.join(allowed)}")
        for what, number, most in (("context", context, 1 << 30), ("threads", threads, 512)):
            if number is not None and not 1 <= number <= most:
                raise RequestError(f"{what} is {number}; it must be from 1 to {most}")
        if max_batch_size < 1:
            raise RequestError(f"max_batch_size is {max_batch_size}; it must be at least 1")
        self.model, self.dtype, self.threads = model, dtype, threads
        self.path = find_model(model)
        loaded = load_model(self.path)
        self.config = loaded.config
        self.tokenizer: Tokenizer = loaded.tokenizer
        limit = loaded.config.max_position_embeddings
        if context is not None and context > limit:
            raise RequestError(f"context is {context}; this model was trained for at most {limit}")
        size = context or min(limit, DEFAULT_CONTEXT)
        self.engine = Engine(_make_backend(loaded, device, dtype, size, threads, max_batch_size))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        policy: DepthPolicy | str | None = None,
        mode: str | None = None,
        raw: bool = False,
    ) -> Any:
        """Answer a prompt (an `Output`) or a list of prompts together (a list of them).

        Args:
            prompts: text, messages (`[{"role": ..., "content": ...}]`), or a list of either.
            params: how to sample and when to stop; default greedy.
            policy: a `DepthPolicy`, the name of a shipped one, or a file.
            mode: "full" for all layers, "taper" for a policy; default taper where a shipped policy fits the model.
            raw: take text as it is, without the chat template.

        Raises:
            RequestError: a prompt is empty or too long, or options contradict each other.
            PolicyError: the policy is damaged or made for another model.
        """
        outputs: dict[int, Output] = {}
        for chunk in self.stream(prompts, params, policy=policy, mode=mode, raw=raw):
            if chunk.output is not None:
                outputs[chunk.index] = chunk.output
        answers = [outputs[index] for index in sorted(outputs)]
        return answers[0] if _is_prompt(prompts) else answers

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        policy: DepthPolicy | str | None = None,
        mode: str | None = None,
        raw: bool = False,
    ) -> Generator[Chunk, None, None]:
        """Answer as `generate` does, one chunk a token. Ctrl-C ends it with what was made so far, as "abort"."""
        batch: Any = [prompts] if _is_prompt(prompts) else prompts
        if not batch:
            raise RequestError("there is no prompt")
        encoded = [self.encode(prompt, raw) for prompt in batch]
        chosen, stop_ids = self.resolve_policy(policy, mode), self.tokenizer.stop_ids
        return self._stream([Request(ids, params or SamplingParams(), chosen, stop_ids) for ids in encoded])

    def _stream(self, requests: list[Request]) -> Generator[Chunk, None, None]:
        started, paused = time.perf_counter(), 0.0
        answers = [_Answer(self.tokenizer, request) for request in requests]
        try:
            with closing(self.engine.generate_step(requests)) as steps:
                for step in steps:
                    chunk = answers[step.row.index].add(step, time.perf_counter() - started - paused)
                    handed_over = time.perf_counter()
                    yield chunk
                    paused += time.perf_counter() - handed_over
        except KeyboardInterrupt:
            for index, answer in enumerate(answers):
                if not answer.finished:
                    yield answer.abort(index)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt: messages, or text as one user message where the model has a chat template.

        Raises:
            RequestError: it is empty, not messages, not valid Unicode, or does not fit into the context.
        """
        text = prompt if isinstance(prompt, str) and (raw or not self.tokenizer.chat_template) else None
        if text is None:
            if raw:
                raise RequestError("raw goes with text, not with messages")
            text = self._render([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        elif text.strip():
            ids = self.tokenizer.encode(text)
        else:
            raise RequestError("the prompt is empty", "give some text")
        self.engine.check_prompt(ids)
        return ids

    def _render(self, messages: Sequence[Message]) -> str:
        """The prompt of messages, checked."""
        for message in messages:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise RequestError(f"{message!r} is not a message", 'a message is {"role": "user", "content": "..."}')
        if not messages[-1]["content"].strip():
            raise RequestError("the prompt is empty", "give some text")
        return self.tokenizer.render(messages)

    def resolve_policy(self, policy: DepthPolicy | str | None = None, mode: str | None = None) -> DepthPolicy:
        """The policy that a policy and a mode stand for on this model; warns where that may surprise.

        Raises:
            RequestError: the two contradict each other, or there is no such mode.
            PolicyError: there is no such policy, or it was made for another model.
        """
        if mode is not None and mode not in MODES:
            raise RequestError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")
        if mode == "full":
            if policy is not None:
                raise RequestError("mode full runs every layer; it takes no policy", "leave out one of the two")
            return DepthPolicy.full(self.config.num_hidden_layers)
        if policy is None:
            fitting = self.shipped_policies()
            if DEFAULT_POLICY in fitting:
                policy = fitting[DEFAULT_POLICY]
            elif mode == "taper":
                raise PolicyError("no shipped policy fits this model", "give one with --policy, or --alpha")
            else:
                _warn("no shipped policy fits this model: running every layer")
                return DepthPolicy.full(self.config.num_hidden_layers)
        if isinstance(policy, str):
            policy = self.shipped_policies().get(policy) or load_policy(_policy_path(policy))
        if warning := policy.check_model(self.config.num_hidden_layers, self.config.identity):
            _warn(warning)
        return policy

    def shipped_policies(self) -> dict[str, DepthPolicy]:
        """The policies that come with Taper and fit this model, by name."""
        fitting = {}
        for policies in shipped_policies().values():
            for policy in policies:
                try:
                    policy.check_model(self.config.num_hidden_layers, self.config.identity)
                except PolicyError:
                    continue
                fitting[policy.name] = policy
        return fitting


class _Answer:
    """One answer as it grows."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.request = request
        self.finished = False
        self._text, self._stops = TextStream(tokenizer), _StopText(tuple(request.params.stop))
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._depths: list[int] = []
        self._times: list[float] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, step: Step, seconds: float) -> Chunk:
        """Take a step that came `seconds` after the call."""
        row = step.row
        if row.finish_reason == "stop":  # a stop id is no part of the answer
            piece = self._text.flush()
        else:
            self._ids.append(step.token_id)
            self._depths.append(step.depth)
            self._times.append(seconds)
            if step.logprobs is not None:
                self._logprobs.append(step.logprobs)
            piece = self._text.push(step.token_id)
            if row.finish_reason is not None:
                piece += self._text.flush()
        piece = self._stops.push(piece)
        if self._stops.found:
            row.finish_reason = "stop"
        elif row.finish_reason is not None:
            piece += self._stops.flush()
        self._pieces.append(piece)
        output = None if row.finish_reason is None else self._output(row.finish_reason)
        return Chunk(row.index, piece, step.token_id, step.depth, output)

    def abort(self, index: int) -> Chunk:
        """End it here, with what there is."""
        piece = self._stops.push(self._text.flush()) + self._stops.flush()
        self._pieces.append(piece)
        return Chunk(index, piece, -1, 0, self._output("abort"))

    def _output(self, finish_reason: str) -> Output:
        self.finished = True
        tapered, times = self._depths[1:], self._times
        elapsed = times[-1] - times[0] if times else 0.0
        return Output(
            text="".join(self._pieces),
            token_ids=self._ids,
            finish_reason=finish_reason,
            prompt_tokens=len(self.request.prompt_ids),
            depths=self._depths,
            mean_depth=sum(tapered) / len(tapered) if tapered else float(self.request.policy.num_hidden_layers),
            ttft_s=times[0] if times else 0.0,
            tokens_per_second=(len(times) - 1) / elapsed if elapsed else 0.0,
            policy=self.request.policy,
            logprobs=None if self.request.params.logprobs is None else self._logprobs,
        )


class _StopText:
    """Finds stop strings in a growing text, and holds back what may be the start of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held = stops, ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string; none after one was found."""
        if self.found:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            return self._held[: min(places)]
        longest = max((self._overlap(stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - longest], self._held[len(self._held) - longest :]
        return certain

    def flush(self) -> str:
        """What is still held when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._held.endswith(stop[:size])), 0)


def _is_prompt(prompts: Any) -> bool:
    """One prompt (text or messages), not a list of prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], dict))


def _make_backend(
    loaded: LoadedModel, device: str, dtype: str, context: int, threads: int | None, num_slots: int
) -> Backend:
    """The backend for a device; each is imported only where it is used."""
    device = choose_device(device)
    if device == "cpu":
        from .backends.ggml import GgmlBackend

        converted = "f16" if dtype == "auto" and loaded.config.quantization == "BF16" else dtype
        return GgmlBackend(
            loaded.config,
            loaded.tensors,
            num_slots=num_slots,
            context_length=context,
            dtype=None if converted == "auto" else converted,
            kv_dtype="f32" if dtype == "f32" else "f16",
            threads=threads,
        )
    if threads is not None:
        raise RequestError("threads does nothing on cuda", "leave it out")
    try:
        from .backends.torch import TorchBackend
    except ImportError:
        raise RequestError("device cuda needs PyTorch", 'pip install "taper-llm[torch]", or use --device cpu') from None
    return TorchBackend(
        loaded.config,
        loaded.tensors,
        num_slots=num_slots,
        context_length=context,
        dtype="bf16" if dtype == "auto" else dtype,
        device="cuda",
    )


def choose_device(device: str) -> str:
    """What "auto" stands for here: cuda where PyTorch and a GPU are there."""
    if device == "auto":
        return "cuda" if _cuda_is_there() else "cpu"
    return device


def _cuda_is_there() -> bool:
    if not Path("/proc/driver/nvidia").exists():  # saves importing torch on machines without a GPU
        return False
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _policy_path(name: str) -> Path:
    if not os.path.exists(name) and not name.endswith(".json"):
        raise PolicyError(f"no policy {name!r} for this model", "taper policy list shows those shipped; or give a file")
    return Path(name)


def _warn(message: str) -> None:
    warnings.warn(message, TaperWarning, stacklevel=3)
