"""Text in, text out: a model with its options, prompts as token ids, and policies by name, on the engine."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, overload

from .backends import open_backend
from .engine import Engine, Request, takes_filled
from .engine.drafting import Drafting
from .errors import (
    DRAFTERS,
    EXACT,
    HEADS,
    MODES,
    OFF,
    REPACK,
    REUSE,
    ModelError,
    PolicyError,
    RequestError,
    TaperWarning,
    flag,
    one_of,
    shown,
    whole_number,
)
from .models import load_model
from .models.download import DEFAULT_MODEL
from .models.fetch import find_or_fetch
from .models.policies import FULL, TAPERING, default_policy, fitting_policies, resolve_policy
from .models.tokenizer import EFFORTS, Message, texts_of
from .policy import DepthPolicy
from .sampling import SamplingParams
from .stream import Chunk, LatestOutputs, Output, Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from Python 3.11 on

    from .models.grammars import Grammars

Prompt = str | Message | Sequence[Message] | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams]

DEFAULT_CONTEXT = 4096
MAX_TOKEN_CHARACTERS = 256  # of a prompt for each token that fits; the longest real tokens have half of that
# Of models that recommend nothing; as in llama.cpp.
DEFAULT_SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


class GenerateOptions(TypedDict, total=False):
    """What `generate`, `chat`, `stream` and `astream` take besides prompts and `params`, all of it by name.

    Without `params`, the parameters of `SamplingParams` are options too, as in `LLM.sampling_params`.

    Args:
        policy: a `DepthPolicy`, the name of a shipped one, or a file; default that of the model, or full depth.
        mode: "full" for all layers, "taper" for a policy, "exact" for all layers with drafts, for which `policy` is
            then.
        raw: take text as it is, without the chat template; control tokens in it count.
        parse_special: let control tokens in messages count too. By default they are text, so that whoever writes a
            message cannot end it and begin another turn.
        think: switch the thoughts of a thinking model on or off, or where its chat template knows that, say how much to
            think: low, medium or high. By default its template decides.
        reuse: what a tapered prompt may take from earlier outputs that it continues. "filled": all of their tokens;
            where a layer was skipped, it attends to keys and values that were filled in. "exact": only tokens that
            every layer ran; the others are computed again, so the output is that of a cold start.
        response_format: a JSON schema that the output has to keep.
        draft: "ngram", "policy" or "auto" proposes tokens, which changes no output and may be sooner (`Drafting`);
            "off"; default auto in mode exact, else off.
    """

    policy: DepthPolicy | str | Path | None
    mode: str | None
    raw: bool
    parse_special: bool
    think: bool | str | None
    reuse: str
    response_format: dict[str, Any] | None
    draft: Drafting | str | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int | None


class LLM:
    """A model ready to complete prompts. Calls from several threads take turns on it.

    Args:
        model: a name or a hub id (ORG/MODEL), fetched if it is not here yet, a GGUF file or a Hugging Face folder.
        device: "cpu" (ggml), "cuda" (PyTorch), "auto": cuda if PyTorch and a GPU are there, or another device that
            the ggml library has, such as "vulkan", "metal" or "vulkan1".
        dtype: "f32", "f16", "bf16" to convert the weights; on a CPU "q8_0", "q6_k", "q4_k", "iq4_nl", "q4_0" to
            quantise them; "auto" uses them as they are (bf16 as f16 on a CPU).
        context: tokens that prompt and output may have together; default 4096, or the model's limit if lower.
        threads: CPU threads; default the cores this process may use.
        max_batch_size: outputs generated at a time.
        repack: on a CPU, "always" copies matrices into the layout that it multiplies fastest, where their type has
            one; "auto" also keeps a second layout where many tokens are faster with it and memory is free; "never" uses
            the mapped file alone, which processes share.
        gpu_layers: on a device of ggml, how many layers it runs, the last ones; the CPU runs the others. Default all.
        head: with ggml, "full" computes the logits of the whole vocabulary; "shortlist" approximates them, and computes
            those that matter; "auto" does so if it is faster on this machine, but not with f32 weights.
        offline: do not fetch a model that has a name and is not on this machine.
        progress: on a CPU, called with the part of the weights that is loaded, 0 to 1; with a shortlist, the first time
            again with the part of its preview that is made.

    Used in a `with` statement, or once it is closed, it gives back the memory of the weights.

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
        repack: str = REPACK[0],
        gpu_layers: int | None = None,
        head: str = HEADS[0],
        offline: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        threads = None if threads is None else whole_number("threads", threads, 1, 512)
        num_slots = whole_number("max_batch_size", max_batch_size, 1)
        context = None if context is None else whole_number("context", context, 1, 1 << 30)
        if not isinstance(model, str | Path):
            raise RequestError(f"model is {shown(model)}; it must be a name or a path")
        self.model, self.dtype, self.threads = str(model), dtype, threads
        self.path = find_or_fetch(self.model, flag("offline", offline))
        loaded = load_model(self.path)
        try:
            SamplingParams(**loaded.sampling)
        except RequestError as error:
            raise ModelError(f"{self.path} recommends sampling that cannot be: {error.message}", "correct it") from None
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
            head=head,
            gpu_layers=gpu_layers,
            progress=progress,
        )
        self.config, self.tokenizer, self.engine = backend.config, loaded.tokenizer, Engine(backend)
        self.sampling = dict(loaded.sampling or DEFAULT_SAMPLING)
        self.outputs = LatestOutputs()

    def close(self) -> None:
        """Give back the memory of the weights and of the key-value cache; nothing can be generated afterwards."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles JSON schemas for this model's tokens; raises a RequestError if llguidance is missing."""
        try:
            from .models.grammars import Grammars
        except ImportError:
            raise RequestError("keeping to a schema needs llguidance", 'pip install "taper-llm[serve]"') from None
        return Grammars(self.tokenizer, self.config.vocab_size)

    @overload
    def generate(  # type: ignore[overload-overlap]  # text is a sequence of texts too
        self, prompts: str | Message | list[Message], params: Params | None = None, **how: Unpack[GenerateOptions]
    ) -> Output: ...

    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: Params | None = None, **how: Unpack[GenerateOptions]
    ) -> list[Output]: ...

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params | None = None, **how: Unpack[GenerateOptions]
    ) -> Output | list[Output]:
        """Complete a prompt (an `Output`) or a list of prompts together (a list of them).

        Args:
            prompts: text, messages (`[{"role": ..., "content": ...}]`), token ids, or several of one kind.
            params: how to sample and when to stop, for all or one for each prompt.
            how: see `GenerateOptions`.

        Raises:
            RequestError: a prompt is empty or too long, or options contradict each other.
            PolicyError: the policy is damaged or made for another model.
            ModelError: the model's output is not a number.
            TypeError: there is no such option.
        """
        alone = _is_prompt(prompts)
        with self.stream(prompts, params, **how) as stream:
            outputs = {chunk.index: chunk.output for chunk in stream if chunk.output is not None}
        return outputs[0] if alone else [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        messages: Message | Sequence[Message],
        params: SamplingParams | None = None,
        **how: Unpack[GenerateOptions],
    ) -> Output:
        """Answer a conversation: `generate` with messages, which takes the same arguments.

        Raises:
            RequestError: these are no messages; what `generate` raises.
        """
        if not _is_prompt(messages) or isinstance(messages, str):
            raise RequestError(f"{shown(messages)} is no conversation", "give messages; generate takes text too")
        output: Output = self.generate(messages, params, **how)  # type: ignore[assignment]
        return output

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params | None = None,
        *,
        policy: DepthPolicy | str | Path | None = None,
        mode: str | None = None,
        raw: bool = False,
        parse_special: bool = False,
        think: bool | str | None = None,
        reuse: str = REUSE[0],
        response_format: dict[str, Any] | None = None,
        draft: Drafting | str | None = None,
        **given: Any,
    ) -> Stream:
        """Complete as `generate` does, but return the chunks as they come, one for each token."""
        are_several = isinstance(prompts, Iterable) and not isinstance(prompts, bytes) and not _is_prompt(prompts)
        batch: list[Any] = list(prompts) if are_several else [prompts]  # `encode` rejects what cannot be a prompt
        if not batch:
            raise RequestError("there is no prompt", "give at least one")
        if params is not None and given:
            raise RequestError(f"params and {min(given)} are both given", "use only one of the two")
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.sampling_params(**given)] * len(batch)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise RequestError(
                f"params is {shown(params)}", "give SamplingParams(max_tokens=64), or one for each prompt"
            )
        if len(params) != len(batch):
            raise RequestError(f"there are {len(params)} params for {len(batch)} prompts", "give one for each, or one")
        drafting = self.resolve_drafting(draft, mode, policy)
        chosen, eos_token_ids = self.resolve_policy(policy, mode), self.tokenizer.eos_token_ids
        filled = takes_filled(chosen, one_of("reuse", reuse, REUSE))
        encoded = [self.encode(prompt, raw, parse_special, think=think, as_generated=filled) for prompt in batch]
        continues = raw or not self.tokenizer.chat_template  # the text of its prompt, as for token ids
        goes_on = continues or any(map(_are_ids, batch))
        token_filter = None if response_format is None else self.grammars.compile(response_format, goes_on)
        requests = [
            Request(ids, one, chosen, eos_token_ids, token_filter, reuse, continues or _are_ids(prompt), drafting)
            for prompt, ids, one in zip(batch, encoded, params, strict=True)
        ]
        return self.stream_of(requests)

    def stream_of(self, requests: Sequence[Request], started: float | None = None, first_index: int = 0) -> Stream:
        """The stream of requests that are made already (see `Stream`)."""
        return Stream(self.engine, self.tokenizer, self.outputs, requests, started, first_index)

    async def astream(
        self, prompts: Prompt | Iterable[Prompt], params: Params | None = None, **how: Unpack[GenerateOptions]
    ) -> AsyncIterator[Chunk]:
        """The chunks of `stream`, which takes the same arguments, for `async for`; steps run in a thread of asyncio's.

        Several at a time take turns. Leaving the loop gives up what has not finished.
        """
        import asyncio  # takes longer than everything else that this file imports

        stream = await asyncio.to_thread(self.stream, prompts, params, **how)
        try:
            while (chunk := await asyncio.to_thread(next, stream, None)) is not None:
                yield chunk
        finally:
            stream.close()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """How to sample: what is given, and of the rest what the model's authors recommend (`sampling`).

        With `temperature` 0 the most probable token is taken, and what they recommend does not count.

        Raises:
            RequestError: a value out of its range.
            TypeError: there is no such parameter.
        """
        return SamplingParams(**given if given.get("temperature") == 0 else self.sampling | given)

    def encode(
        self,
        prompt: Prompt,
        raw: bool = False,
        parse_special: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        think: bool | str | None = None,
        as_generated: bool = False,
        **ending: bool | None,
    ) -> list[int]:
        """Token ids of a prompt: messages, or text as one user message if the model has a chat template.

        `tools` are functions that the model may call, for its chat template, in the form of OpenAI's API. `think`: as
        for `generate`. `ending` may hold `add_generation_prompt` and `continue_final_message`, see `Tokenizer.render`.
        `as_generated`: messages that repeat earlier outputs get the tokens that were generated then.

        Raises:
            RequestError: it is empty, not messages, not valid Unicode, or does not fit into the context.
        """
        ids = self.tokenize(prompt, raw, parse_special, tools, think, as_generated, **ending)
        self.engine.check_prompt(ids)
        return ids

    def tokenize(
        self,
        prompt: Prompt,
        raw: bool = False,
        parse_special: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        think: bool | str | None = None,
        as_generated: bool = False,
        **ending: bool | None,
    ) -> list[int]:
        """The same token ids, even if there are none or the context has no room for them.

        Raises:
            RequestError: it is not messages, not valid Unicode, or so long that reading it would take minutes.
        """
        if not isinstance(prompt, str | Mapping | list | tuple):
            raise RequestError(f"a prompt is {shown(prompt)}; it must be text, messages or token ids")
        if _are_ids(prompt):
            return [whole_number("a token id", token_id, 0, self.config.vocab_size - 1) for token_id in prompt]
        raw, parse_special = flag("raw", raw), flag("parse_special", parse_special)
        think = think if think is None or think in EFFORTS else flag("think", think)
        if isinstance(prompt, str) and (raw or not self.tokenizer.chat_template):
            if think is not None:
                raise RequestError("think does nothing without a chat template", "leave it out")
            self._check_length(len(prompt))
            return self.tokenizer.encode(prompt)
        if raw:
            raise RequestError("raw goes with text, not with messages")
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            raise RequestError("the prompt is empty", "give some text")
        messages = _messages({"role": "user", "content": prompt} if isinstance(prompt, str) else prompt)
        rest = [{key: message[key] for key in message if key not in ("role", "content")} for message in messages]
        texts = [*(message["content"] for message in messages), *texts_of([*rest, *tools])]
        self._check_length(sum(map(len, texts)))
        outputs = self.outputs.by_text if as_generated else {}
        return self.tokenizer.encode_messages(messages, parse_special, tools, outputs, think=think, **ending)

    def encode_infill(
        self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = (), written: str = ""
    ) -> list[int]:
        """Token ids that ask for what is missing between two texts; `generate` takes them as a prompt.

        Its output ends by itself only if `stop_token_ids` has those of `infill_ends`. The arguments are those of
        `taper.models.infill.encode_infill`.

        Raises:
            RequestError: the model has no tokens for it, or the context has no room.
        """
        from .models.infill import encode_infill

        self._check_length(sum(map(len, (prefix, suffix, written, *(text for _, text in files)))))
        ids = encode_infill(self.tokenizer, prefix, suffix, files, written)
        self.engine.check_prompt(ids)
        return ids

    @property
    def infill_ends(self) -> frozenset[int]:
        """The tokens that end what is filled in, besides the model's own; a RequestError if it cannot fill in."""
        from .models.infill import infill_tokens

        return infill_tokens(self.tokenizer).ends

    def _check_length(self, count: int) -> None:
        """Reject at once what would take the tokenizer minutes and cannot fit."""
        if count > (most := MAX_TOKEN_CHARACTERS * self.engine.backend.context_length):
            raise RequestError(f"the prompt has {count} characters; the context holds at most {most}", "shorten it")

    def resolve_policy(self, policy: DepthPolicy | str | Path | None = None, mode: str | None = None) -> DepthPolicy:
        """The policy that a policy and a mode stand for on this model; warns if that may surprise.

        In mode exact it is full depth, as the policy only drafts (`resolve_drafting`).

        Raises:
            RequestError: the two contradict each other, or there is no such mode.
            PolicyError: there is no such policy, or it was made for another model.
        """
        mode = None if mode is None else one_of("mode", mode, MODES)
        if mode == EXACT:
            mode, policy = FULL, None
        if mode is not None and policy is not None and (mode == FULL) != (policy == FULL):
            rule = "runs every layer; it takes no policy" if mode == FULL else "and policy full contradict each other"
            raise RequestError(f"mode {mode} {rule}", "leave out one of the two")
        if mode == FULL:
            policy = FULL
        elif policy is None:
            policy = self.default_policy or (FULL if mode is None else self._tapering_policy())
        return resolve_policy(policy, self.config.num_hidden_layers, self.config.identity)

    def resolve_drafting(
        self,
        draft: Drafting | str | None = None,
        mode: str | None = None,
        policy: DepthPolicy | str | Path | None = None,
        *,
        exact_bits: bool = False,
        **limits: Any,
    ) -> Drafting | None:
        """How to draft for a kind of drafts, or for the default of a mode; None if nothing is drafted.

        Args:
            draft: "auto", "ngram", "mtp", "policy" or "off"; a `Drafting` is returned as it is.
            mode: in mode exact, the default is auto.
            policy: in mode exact the policy that drafts; by default, and in other modes, the fastest shipped one.
            exact_bits: verify no more tokens at a time than give the same bits as single ones (`Engine.bitwise_width`);
                with "off", attention sums in the same order as with drafts.
            limits: `max_tokens`, `min_match` and `min_probability` of `Drafting`.

        Raises:
            RequestError: a value out of its range, no policy to draft with, or one that runs every layer.
            PolicyError: the policy is damaged or made for another model.
        """
        if isinstance(draft, Drafting):
            return draft
        kind = one_of("draft", draft or ("auto" if mode == EXACT else OFF), (*DRAFTERS, OFF))
        width = self.engine.bitwise_width if exact_bits else None
        if kind == OFF:
            return None
        if width == 1:
            message = "these kernels round two tokens differently from one, so nothing is drafted"
            warnings.warn(message, TaperWarning, stacklevel=2)
        if mode != EXACT or policy is None:
            drafter = min(self.shipped_policies().values(), key=lambda shipped: shipped.mean_depth(128), default=None)
        else:
            drafter = self.resolve_policy(policy)
            if not drafter.tapers:
                raise RequestError("policy full runs every layer, so it cannot draft", "name another, or leave it out")
        return Drafting(kind, policy=drafter, max_width=width, **limits)

    @property
    def default_policy(self) -> DepthPolicy | None:
        """The shipped policy that runs where nobody names one: one that holds in long outputs. None: full depth."""
        return default_policy(self.config.num_hidden_layers, self.config.identity)

    def _tapering_policy(self) -> DepthPolicy:
        """The shipped policy of mode taper where none holds in long outputs."""
        shipped = self.shipped_policies()
        if not shipped:
            raise PolicyError("no shipped policy fits this model", "give one with --policy, or --alpha")
        return next((shipped[name] for name in TAPERING if name in shipped), next(iter(shipped.values())))

    def shipped_policies(self) -> dict[str, DepthPolicy]:
        """The policies that come with Taper and fit this model, by name."""
        return fitting_policies(self.config.num_hidden_layers, self.config.identity)


def _is_prompt(prompts: Any) -> bool:
    """One prompt (text, a message, messages or token ids), not several."""
    if isinstance(prompts, list | tuple):
        return len(prompts) > 0 and (isinstance(prompts[0], Mapping) or _are_ids(prompts))
    return isinstance(prompts, str | Mapping)


def _are_ids(prompt: Any) -> bool:
    """Token ids, instead of text or messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and type(prompt[0]) is int


def _messages(prompt: Any) -> list[Message]:
    """A message or messages, checked."""
    messages = [prompt] if isinstance(prompt, Mapping) else list(prompt)
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{shown(message)} is not a message", 'a message is {"role": "user", "content": "..."}')
    last = messages[-1]  # a tool may well have nothing to say
    if not (last["content"].strip() or last.get("tool_calls") or last["role"] == "tool"):
        raise RequestError("the last message is empty", "give some text")
    return [dict(message) for message in messages]
