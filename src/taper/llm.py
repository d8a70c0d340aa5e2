"""Text in, text out: prompts, policies by name, and streams of outputs, on the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from .backends import Backend, open_backend
from .checks import MODES, flag, one_of, shown, whole_number
from .engine import Engine
from .errors import PolicyError, RequestError, TaperWarning
from .loading import load_model
from .loading.tokenizer import Message, Tokenizer, texts_of
from .models import DEFAULT_MODEL, find_model
from .output import Output
from .policies import find_policy, fitting_policies
from .policy import DepthPolicy
from .sampling import SamplingParams
from .sequence import Request
from .stream import Stream

Prompt = str | Message | Sequence[Message]
Params = SamplingParams | Sequence[SamplingParams]

DEFAULT_CONTEXT = 4096
MAX_TOKEN_CHARACTERS = 256  # of a prompt for each token that fits; the longest real tokens have half of that
DEFAULT_POLICY = "balanced"


class LLM:
    """A model ready to complete prompts. Calls from several threads take turns on it.

    Args:
        model: a name, a hub id that was pulled, a GGUF file or a Hugging Face folder.
        device: "cpu" (ggml), "cuda" (PyTorch), or "auto": cuda if PyTorch and a GPU are there.
        dtype: "f32", "f16", "bf16" to convert the weights; on a CPU "q8_0", "q6_k", "q4_k", "iq4_nl", "q4_0" to
            quantise them; "auto" uses them as they are (bf16 as f16 on a CPU).
        context: tokens that prompt and output may have together; default 4096, or the model's limit if lower.
        threads: CPU threads; default the cores this process may use.
        max_batch_size: outputs generated at a time.
        repack: on a CPU, copy matrices into the layout that it multiplies fastest, where their type has one; False uses
            the mapped file alone, which processes share.
        progress: on a CPU, called with the part of the weights that is loaded, 0 to 1.

    Raises:
        ModelError: the model is missing, damaged or not supported.
        RequestError: an option out of its range.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        context: int | None = None,
        threads: int | None = None,
        max_batch_size: int = 8,
        repack: bool = True,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        repack = flag("repack", repack)
        threads = None if threads is None else whole_number("threads", threads, 1, 512)
        num_slots = whole_number("max_batch_size", max_batch_size, 1)
        context = None if context is None else whole_number("context", context, 1, 1 << 30)
        if not isinstance(model, str | Path):
            raise RequestError(f"model is {shown(model)}; it must be a name or a path")
        self.model, self.dtype, self.threads = str(model), dtype, threads
        self.path = find_model(self.model)
        loaded = load_model(self.path)
        limit = loaded.config.max_position_embeddings
        if context is not None and context > limit:
            raise RequestError(f"context is {context}; this model was trained for at most {limit}")
        backend = open_backend(
            loaded,
            device=device,
            dtype=dtype,
            context_length=context or min(limit, DEFAULT_CONTEXT),
            num_slots=num_slots,
            threads=threads,
            repack=repack,
            progress=progress,
        )
        self.config, self.tokenizer, self.engine = backend.config, loaded.tokenizer, Engine(backend)

    @classmethod
    def from_backend(cls, backend: Backend, tokenizer: Tokenizer, path: Path, dtype: str = "auto") -> LLM:
        """An LLM on a backend that is open already, with weights of this `dtype`; the model's files are at `path`."""
        llm = cls.__new__(cls)
        llm.model, llm.path, llm.dtype, llm.threads = str(path), path, dtype, None
        llm.config, llm.tokenizer, llm.engine = backend.config, tokenizer, Engine(backend)
        return llm

    @overload
    def generate(  # type: ignore[overload-overlap]  # text is a sequence of texts too
        self,
        prompts: str | Message | list[Message],
        params: Params | None = None,
        *,
        policy: DepthPolicy | str | Path | None = None,
        mode: str | None = None,
        raw: bool = False,
        parse_special: bool = False,
        think: bool | None = None,
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params | None = None,
        *,
        policy: DepthPolicy | str | Path | None = None,
        mode: str | None = None,
        raw: bool = False,
        parse_special: bool = False,
        think: bool | None = None,
    ) -> list[Output]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | None = None,
        *,
        policy: DepthPolicy | str | Path | None = None,
        mode: str | None = None,
        raw: bool = False,
        parse_special: bool = False,
        think: bool | None = None,
    ) -> Output | list[Output]:
        """Complete a prompt (an `Output`) or a list of prompts together (a list of them).

        Args:
            prompts: text, messages (`[{"role": ..., "content": ...}]`), or several of either.
            params: how to sample and when to stop, for all or one for each prompt; default greedy.
            policy: a `DepthPolicy`, the name of a shipped one, or a file.
            mode: "full" for all layers, "taper" for a policy; default taper if a shipped policy fits the model.
            raw: take text as it is, without the chat template; control tokens in it count.
            parse_special: let control tokens in messages count too. By default they are text, so that whoever writes a
                message cannot end it and begin another turn.
            think: switch the thoughts of a thinking model on or off; by default its chat template decides.

        Raises:
            RequestError: a prompt is empty or too long, or options contradict each other.
            PolicyError: the policy is damaged or made for another model.
            ModelError: the model's output is not a number.
        """
        outputs: dict[int, Output] = {}
        alone = _is_prompt(prompts)
        how: dict[str, Any] = {"raw": raw, "parse_special": parse_special, "think": think}
        with self.stream(prompts, params, policy=policy, mode=mode, **how) as stream:
            for chunk in stream:
                if chunk.output is not None:
                    outputs[chunk.index] = chunk.output
        return outputs[0] if alone else [outputs[index] for index in sorted(outputs)]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | None = None,
        *,
        policy: DepthPolicy | str | Path | None = None,
        mode: str | None = None,
        raw: bool = False,
        parse_special: bool = False,
        think: bool | None = None,
    ) -> Stream:
        """Complete as `generate` does, but return the chunks as they come, one for each token."""
        batch = _as_list(prompts)
        if not batch:
            raise RequestError("there is no prompt", "give at least one")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(batch)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise RequestError(
                f"params is {shown(params)}", "give SamplingParams(max_tokens=64), or one for each prompt"
            )
        if len(params) != len(batch):
            raise RequestError(f"there are {len(params)} params for {len(batch)} prompts", "give one for each, or one")
        encoded = [self.encode(prompt, raw, parse_special, think=think) for prompt in batch]
        chosen, eos_token_ids = self.resolve_policy(policy, mode), self.tokenizer.eos_token_ids
        requests = [Request(ids, one, chosen, eos_token_ids) for ids, one in zip(encoded, params, strict=True)]
        return Stream(self.engine, self.tokenizer, requests)

    def encode(
        self,
        prompt: Prompt,
        raw: bool = False,
        parse_special: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        think: bool | None = None,
    ) -> list[int]:
        """Token ids of a prompt: messages, or text as one user message if the model has a chat template.

        `tools` are functions that the model may call, for its chat template, in the form of OpenAI's API. `think`
        switches the thoughts of a thinking model on or off; by default its template decides.

        Raises:
            RequestError: it is empty, not messages, not valid Unicode, or does not fit into the context.
        """
        if not isinstance(prompt, str | Mapping | list | tuple):
            raise RequestError(f"a prompt is {shown(prompt)}; it must be text or messages")
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise RequestError("the prompt is empty", "give some text")
        raw, parse_special = flag("raw", raw), flag("parse_special", parse_special)
        think = None if think is None else flag("think", think)
        if isinstance(prompt, str) and (raw or not self.tokenizer.chat_template):
            if think is not None:
                raise RequestError("think does nothing without a chat template", "leave it out")
            self._check_length(len(prompt))
            ids = self.tokenizer.encode(prompt)
        elif raw:
            raise RequestError("raw goes with text, not with messages")
        else:
            messages = _messages({"role": "user", "content": prompt} if isinstance(prompt, str) else prompt)
            rest = [{key: message[key] for key in message if key not in ("role", "content")} for message in messages]
            texts = [*(message["content"] for message in messages), *texts_of([*rest, *tools])]
            self._check_length(sum(map(len, texts)))
            ids = self.tokenizer.encode_messages(messages, parse_special, tools, think)
        self.engine.check_prompt(ids)
        return ids

    def _check_length(self, characters: int) -> None:
        """Reject at once what would take the tokenizer minutes and cannot fit."""
        if characters > (most := MAX_TOKEN_CHARACTERS * self.engine.backend.context_length):
            raise RequestError(
                f"the prompt has {characters} characters; the context holds at most {most}", "shorten it"
            )

    def resolve_policy(self, policy: DepthPolicy | str | Path | None = None, mode: str | None = None) -> DepthPolicy:
        """The policy that a policy and a mode stand for on this model; warns if that may surprise.

        Raises:
            RequestError: the two contradict each other, or there is no such mode.
            PolicyError: there is no such policy, or it was made for another model.
        """
        if mode is not None and one_of("mode", mode, MODES) == "full":
            if policy is not None:
                raise RequestError("mode full runs every layer; it takes no policy", "leave out one of the two")
            return DepthPolicy.full(self.config.num_hidden_layers)
        fitting = self.shipped_policies()
        if policy is None:
            if DEFAULT_POLICY not in fitting:
                if mode == "taper":
                    raise PolicyError("no shipped policy fits this model", "give one with --policy, or --alpha")
                _warn("no shipped policy fits this model: running every layer")
                return DepthPolicy.full(self.config.num_hidden_layers)
            policy = DEFAULT_POLICY
        if isinstance(policy, str | Path):
            policy = fitting.get(str(policy)) or find_policy(policy)
        if not isinstance(policy, DepthPolicy):
            raise PolicyError(f"policy is {shown(policy)}", "give a DepthPolicy, the name of a shipped one, or a file")
        if warning := policy.check_model(self.config.num_hidden_layers, self.config.identity):
            _warn(warning)
        return policy

    def shipped_policies(self) -> dict[str, DepthPolicy]:
        """The policies that come with Taper and fit this model, by name."""
        return fitting_policies(self.config.num_hidden_layers, self.config.identity)


def _is_prompt(prompts: Any) -> bool:
    """One prompt (text, a message or messages), not several."""
    if isinstance(prompts, list | tuple):
        return len(prompts) > 0 and isinstance(prompts[0], Mapping)
    return isinstance(prompts, str | Mapping)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list; `LLM.encode` rejects what cannot be a prompt."""
    are_several = isinstance(prompts, Iterable) and not isinstance(prompts, bytes) and not _is_prompt(prompts)
    if batch := list(prompts) if are_several else [prompts]:
        return batch
    raise RequestError("there is no prompt", "give at least one")


def _messages(prompt: Any) -> list[Message]:
    """A message or messages, checked."""
    messages = [prompt] if isinstance(prompt, Mapping) else list(prompt)
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{shown(message)} is not a message", 'a message is {"role": "user", "content": "..."}')
    if not (messages[-1]["content"].strip() or messages[-1].get("tool_calls")):
        raise RequestError("the last message is empty", "give some text")
    return [dict(message) for message in messages]


def _warn(message: str) -> None:
    warnings.warn(message, TaperWarning, stacklevel=3)
