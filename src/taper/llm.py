"""Text in, text out: prompts, policies by name, and streams of outputs, on the engine."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from .backends import Backend, open_backend
from .engine import Engine, Request, StepOutput, takes_filled
from .engine import Sequence as EngineSequence
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
from .models.policies import FULL, default_policy, fitting_policies, resolve_policy
from .models.tokenizer import Message, TextStream, Tokenizer, texts_of
from .policy import DepthPolicy
from .sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from .models.grammars import Grammars

Prompt = str | Message | Sequence[Message] | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams]

DEFAULT_CONTEXT = 4096
MAX_OUTPUTS = 256  # whose tokens are remembered
MAX_TOKEN_CHARACTERS = 256  # of a prompt for each token that fits; the longest real tokens have half of that
# Of models that recommend nothing; as in llama.cpp.
DEFAULT_SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True)
class Output:
    """A completion and what it took.

    `token_ids` leaves out the stop token; `depths` has one entry for each of them, the first of them L. `mean_depth`
    is over steps from 1 on. `ttft_s`: seconds from the call to the first token. `tokens_per_second`: (n - 1) over the
    time from first to last token. Time that the caller spends between chunks is not counted. `cached_tokens`: those of
    the prompt that an earlier one had in common with it, so that they were not computed again. `drafted_tokens`: those
    that were proposed and verified; `accepted_tokens`: those of the completion that had been proposed.
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
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of the completion."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Chunk:
    """What one step added to the output of prompt `index`. The last chunk of an output carries it as `output`.

    `token_id` is -1 and `depth` 0 in the chunk that ends an aborted output. A stop token has no `logprobs`. `seconds`
    is when the token came, counted as the output's times are. `is_drafted`: whether it had been proposed.
    """

    index: int
    text: str
    token_id: int
    depth: int
    output: Output | None = None
    logprobs: TokenLogprobs | None = None
    seconds: float = 0.0
    is_drafted: bool = False


class LLM:
    """A model ready to complete prompts. Calls from several threads take turns on it.

    Args:
        model: a name or a hub id (ORG/MODEL), fetched if it is not here yet, a GGUF file or a Hugging Face folder.
        device: "cpu" (ggml), "cuda" (PyTorch), or "auto": cuda if PyTorch and a GPU are there.
        dtype: "f32", "f16", "bf16" to convert the weights; on a CPU "q8_0", "q6_k", "q4_k", "iq4_nl", "q4_0" to
            quantise them; "auto" uses them as they are (bf16 as f16 on a CPU).
        context: tokens that prompt and output may have together; default 4096, or the model's limit if lower.
        threads: CPU threads; default the cores this process may use.
        max_batch_size: outputs generated at a time.
        repack: on a CPU, "always" copies matrices into the layout that it multiplies fastest, where their type has
            one; "auto" also keeps a second layout where many tokens are faster with it and memory is free; "never" uses
            the mapped file alone, which processes share.
        head: on a CPU, "full" computes the logits of the whole vocabulary; "shortlist" approximates them, and computes
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
            progress=progress,
        )
        self.config, self.tokenizer, self.engine = backend.config, loaded.tokenizer, Engine(backend)
        self.sampling = dict(loaded.sampling or DEFAULT_SAMPLING)
        self.outputs = LatestOutputs()

    @classmethod
    def from_backend(cls, backend: Backend, tokenizer: Tokenizer, path: Path, dtype: str = "auto") -> LLM:
        """An LLM on a backend that is open already, with weights of this `dtype`; the model's files are at `path`."""
        llm = cls.__new__(cls)
        llm.sampling = dict(DEFAULT_SAMPLING)
        llm.model, llm.path, llm.dtype, llm.threads = str(path), path, dtype, None
        llm.config, llm.tokenizer, llm.engine = backend.config, tokenizer, Engine(backend)
        llm.outputs = LatestOutputs()
        return llm

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
    def generate(  # text is a sequence of texts too
        self,
        prompts: str | Message | list[Message],
        params: Params | None = None,
        *,
        policy: DepthPolicy | str | Path | None = None,
        mode: str | None = None,
        raw: bool = False,
        parse_special: bool = False,
        think: bool | None = None,
        reuse: str = REUSE[0],
        response_format: dict[str, Any] | None = None,
        draft: Drafting | str | None = None,
        **given: Any,
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
        reuse: str = REUSE[0],
        response_format: dict[str, Any] | None = None,
        draft: Drafting | str | None = None,
        **given: Any,
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
        reuse: str = REUSE[0],
        response_format: dict[str, Any] | None = None,
        draft: Drafting | str | None = None,
        **given: Any,
    ) -> Output | list[Output]:
        """Complete a prompt (an `Output`) or a list of prompts together (a list of them).

        Args:
            prompts: text, messages (`[{"role": ..., "content": ...}]`), token ids, or several of one kind.
            params: how to sample and when to stop, for all or one for each prompt.
            policy: a `DepthPolicy`, the name of a shipped one, or a file.
            mode: "full" for all layers, "taper" for a policy, "exact" for all layers with drafts, for which `policy` is
                then; default taper if a shipped policy fits the model.
            raw: take text as it is, without the chat template; control tokens in it count.
            parse_special: let control tokens in messages count too. By default they are text, so that whoever writes a
                message cannot end it and begin another turn.
            think: switch the thoughts of a thinking model on or off; by default its chat template decides.
            reuse: what a tapered prompt may take from earlier outputs that it continues. "filled": all of their tokens;
                where a layer was skipped, it attends to keys and values that were filled in. "exact": only tokens that
                every layer ran; the others are computed again, so the output is that of a cold start.
            response_format: a JSON schema that the output has to keep.
            draft: "ngram", "policy" or "auto" proposes tokens, which changes no output and may be sooner (`Drafting`);
                "off"; default auto in mode exact, else off.
            given: without `params`, parameters of `SamplingParams`, as in `sampling_params`.

        Raises:
            RequestError: a prompt is empty or too long, or options contradict each other.
            PolicyError: the policy is damaged or made for another model.
            ModelError: the model's output is not a number.
        """
        alone = _is_prompt(prompts)
        how: dict[str, Any] = {"raw": raw, "parse_special": parse_special, "think": think, "reuse": reuse}
        how |= {"response_format": response_format, "draft": draft}
        with self.stream(prompts, params, policy=policy, mode=mode, **how, **given) as stream:
            outputs = {chunk.index: chunk.output for chunk in stream if chunk.output is not None}
        return outputs[0] if alone else [outputs[index] for index in sorted(outputs)]

    def chat(self, messages: Message | Sequence[Message], params: SamplingParams | None = None, **how: Any) -> Output:
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
        think: bool | None = None,
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
        token_filter = None if response_format is None else self.grammars.compile(response_format)
        continues = raw or not self.tokenizer.chat_template  # the text of its prompt, as for token ids
        requests = [
            Request(ids, one, chosen, eos_token_ids, token_filter, reuse, continues or _are_ids(prompt), drafting)
            for prompt, ids, one in zip(batch, encoded, params, strict=True)
        ]
        return Stream(self, requests)

    async def astream(self, prompts: Prompt | Iterable[Prompt], *arguments: Any, **how: Any) -> AsyncIterator[Chunk]:
        """The chunks of `stream`, which takes the same arguments, for `async for`; steps run in a thread of asyncio's.

        Several at a time take turns. Leaving the loop gives up what has not finished.
        """
        import asyncio  # takes longer than everything else that this file imports

        stream = await asyncio.to_thread(self.stream, prompts, *arguments, **how)
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
        think: bool | None = None,
        as_generated: bool = False,
        **ending: bool | None,
    ) -> list[int]:
        """Token ids of a prompt: messages, or text as one user message if the model has a chat template.

        `tools` are functions that the model may call, for its chat template, in the form of OpenAI's API. `think`
        switches the thoughts of a thinking model on or off; by default its template decides. `ending` may hold
        `add_generation_prompt` and `continue_final_message`, see `Tokenizer.render`. `as_generated`: messages that
        repeat earlier outputs get the tokens that were generated then.

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
        think: bool | None = None,
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
        think = None if think is None else flag("think", think)
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
        elif policy is None and (policy := self.default_policy) is None:
            if mode == "taper":
                raise PolicyError("no shipped policy fits this model", "give one with --policy, or --alpha")
            warnings.warn("no shipped policy fits this model: running every layer", TaperWarning, stacklevel=2)
            policy = FULL
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
            draft: "auto", "ngram", "policy" or "off"; a `Drafting` is returned as it is.
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
        """The shipped policy that runs where nobody names one; None if none fits this model."""
        return default_policy(self.config.num_hidden_layers, self.config.identity)

    def shipped_policies(self) -> dict[str, DepthPolicy]:
        """The policies that come with Taper and fit this model, by name."""
        return fitting_policies(self.config.num_hidden_layers, self.config.identity)


class Stream(Iterator[Chunk]):
    """The chunks of some prompts' outputs as they come. Leave it early with `close`, or `abort` to keep what there is.

    An exception during a step, Ctrl-C among them, leaves the stream as it was: it can go on, be aborted or closed. It
    may be read in another thread than the one that made it. An output that has ended is forgotten once it is delivered.
    """

    def __init__(
        self, llm: LLM, requests: Sequence[Request], started: float | None = None, first_index: int = 0
    ) -> None:
        """Add the requests; times are counted from `started`, by `time.perf_counter`, which is by default now."""
        self._llm, self._engine = llm, llm.engine
        self._next_index = first_index
        self._unfinished: dict[EngineSequence, None] = {}  # the oldest first
        self._waiting: deque[OutputBuilder] = deque()  # in the order in which the engine begins them
        self._begun: dict[OutputBuilder, None] = {}  # those from which more chunks will come
        self._handed_over = time.perf_counter()
        self._started = self._handed_over if started is None else started
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> int:
        """Add one more request; returns the index that its chunks will have, and raises what `Engine.add` raises.

        A stop string that is the name of a control token, which texts leave out, ends the output at this token.
        """
        if (params := request.params).stop:
            control = [token_id for token_id, name in self._llm.tokenizer.special_tokens.items() if name in params.stop]
            request = replace(request, params=replace(params, stop_token_ids=(*params.stop_token_ids, *control)))
        sequence = self._engine.add(request)
        self._unfinished[sequence] = None
        self._waiting.append(OutputBuilder(self._next_index, sequence, self._llm))
        self._next_index += 1
        return self._next_index - 1

    def __next__(self) -> Chunk:
        self._started += time.perf_counter() - self._handed_over  # the caller's own time is not counted
        try:
            output = self._next_output()
        finally:
            self._handed_over = time.perf_counter()
        return output.deliver()

    def _next_output(self) -> OutputBuilder:
        """The output whose turn it is, once it has a chunk; raises StopIteration if no more chunks will come."""
        while True:
            self._take_all()
            if ready := [output for output in self._begun if output.num_ready]:
                return min(ready, key=lambda output: output.num_delivered)
            if not self._unfinished:
                raise StopIteration
            self._engine.step(self._unfinished)

    def received(self) -> list[Chunk]:
        """The chunks of all tokens that have come since the last call, whoever ran the steps.

        Raises:
            ModelError: the model's output is not a number.
            RequestError: the request's filter allows no token.
        """
        self._take_all()
        return [output.deliver() for output in self._begun for _ in range(output.num_ready)]

    @property
    def has_ended(self) -> bool:
        """Whether all outputs have finished; their last chunks may not be delivered yet."""
        return not self._unfinished

    @property
    def unfinished(self) -> tuple[EngineSequence, ...]:
        """The sequences of outputs that have not finished, the oldest first."""
        return tuple(self._unfinished)

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds, in which other outputs advanced."""
        self._started += seconds

    def abort(self) -> list[Chunk]:
        """End every output that has not finished with what there is, as "abort"; the chunks that are left."""
        self.close()
        self._take_all()
        for output in self._begun:
            output.abort()
        return self.received()

    def close(self) -> None:
        """Give up what has not finished."""
        for sequence in list(self._unfinished):
            self._engine.abort(sequence)
            self._unfinished.pop(sequence, None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _take_all(self) -> None:
        """Make chunks of all tokens that have come."""
        while self._waiting and self._waiting[0].has_begun:
            self._begun[self._waiting[0]] = None
            self._waiting.popleft()
        for output in list(self._begun):
            while output.num_taken < len(output.sequence.outputs) and not output.has_ended:
                output.take(time.perf_counter() - self._started)
            if output.has_ended and output.sequence.finish_reason is None:
                self._engine.abort(output.sequence)  # as at a stop string
            if output.sequence.finish_reason is not None:
                self._unfinished.pop(output.sequence, None)
            if output.has_ended and not output.num_ready:
                self._begun.pop(output, None)


class OutputBuilder:
    """The output of prompt `index` as it grows: a chunk for each token of its sequence.

    A chunk counts once it is in `_chunks`: if making one is interrupted, the state is built again from the tokens
    before it.
    """

    def __init__(self, index: int, sequence: EngineSequence, llm: LLM) -> None:
        self.sequence, self._index, self._llm = sequence, index, llm
        self.num_delivered = 0  # chunks
        self._chunks: list[Chunk] = []  # made, and not delivered or just delivered
        self._first = 0  # how many were made before these
        self._has_failed = False
        self._texts: list[str] = []  # of all chunks
        self._begin_text()
        self._times: tuple[float, float] | None = None  # seconds from the call to the first and the last token
        self._is_whole = True  # False while a chunk is made

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun its sequence, or ended it."""
        return self.sequence.slot is not None or self.sequence.finish_reason is not None

    @property
    def num_taken(self) -> int:
        """Chunks that have been made."""
        return self._first + len(self._chunks)

    @property
    def num_ready(self) -> int:
        """Chunks that have been made and not delivered."""
        return self.num_taken - self.num_delivered

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more chunks than those that have been made."""
        return self._has_failed or (bool(self._chunks) and self._chunks[-1].output is not None)

    def deliver(self) -> Chunk:
        """The next chunk that has not been delivered."""
        self.num_delivered += 1
        return self._chunks[self.num_delivered - self._first - 1]

    def take(self, seconds: float) -> None:
        """Make the chunk of the next token, which came `seconds` after the call.

        A stop string may finish the output before its sequence.

        Raises:
            ModelError: the model's output is not a number.
            RequestError: the request's filter allows no token.
        """
        step = self.sequence.outputs[self.num_taken]
        if step.finish_reason == "error":
            self._has_failed = True
            if self.sequence.token_filter is not None:
                raise RequestError(f"the grammar of the output allows no token at step {self.num_taken}")
            raise ModelError(
                f"the model's output is not a number at step {self.num_taken}",
                "try --dtype f32; if that does not help, its files are damaged",
            )
        self._recover()
        self._chunks, self._first = self._chunks[self.num_delivered - self._first :], self.num_delivered
        self._is_whole = False
        is_stop = step.finish_reason == "stop"
        times = self._times if is_stop else (self._times[0] if self._times else seconds, seconds)
        self._texts.append(text := self._text_of(step))
        finish_reason = "stop" if self._stops.complete else step.finish_reason
        output = None if finish_reason is None else self._finished(finish_reason, self.num_taken + 1 - is_stop, times)
        logprobs = None if is_stop else step.logprobs
        chunk = Chunk(self._index, text, step.token_id, step.depth, output, logprobs, seconds, step.is_drafted)
        self._chunks.append(chunk)
        self._is_whole, self._times = True, times

    def abort(self) -> None:
        """End the output here, with what there is."""
        if not self.has_ended:
            self._recover()
            self._is_whole = False
            self._texts.append(text := self._stops.push(self._text.flush(is_cut=True)) + self._stops.flush())
            output = self._finished("abort", self.num_taken, self._times)
            seconds = self._times[1] if self._times else 0.0
            self._chunks.append(Chunk(self._index, text, -1, 0, output, seconds=seconds))

    def _recover(self) -> None:
        """Return to the last chunk, after an interrupt while one was being made."""
        if not self._is_whole:
            self._begin_text()
            self._texts = [self._text_of(step) for step in self.sequence.outputs[: self.num_taken]]
            self._is_whole = True

    def _begin_text(self) -> None:
        request = self.sequence.request
        self._text = TextStream(self._llm.tokenizer, request.prompt_ids if request.text_goes_on else ())
        self._stops = _StopStrings(request.params.stop)

    def _text_of(self, step: StepOutput) -> str:
        """The text that became certain with a token; the stop token is no part of the completion."""
        text = "" if step.finish_reason == "stop" else self._text.push(step.token_id)
        if step.finish_reason is None:
            return self._stops.push(text)
        text += self._text.flush(is_cut=step.finish_reason == "length")
        return self._stops.push(text) + self._stops.flush()

    def _finished(self, finish_reason: str, num_tokens: int, times: tuple[float, float] | None) -> Output:
        """The output of the first tokens of the sequence, the first and last of which came at these times."""
        steps, request = self.sequence.outputs[:num_tokens], self.sequence.request
        depths = [step.depth for step in steps]
        tapered = depths[1:]
        first, last = times or (0.0, 0.0)
        logprobs = [step.logprobs for step in steps if step.logprobs is not None]
        text, token_ids = "".join(self._texts), [step.token_id for step in steps]
        if text and not request.text_goes_on:
            self._llm.outputs.note(text, token_ids)
        return Output(
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_tokens=len(request.prompt_ids),
            depths=depths,
            mean_depth=sum(tapered) / len(tapered) if tapered else float(request.policy.num_hidden_layers),
            ttft_s=first,
            tokens_per_second=(num_tokens - 1) / (last - first) if last > first else 0.0,
            policy=request.policy,
            cached_tokens=self.sequence.num_cached_tokens,
            drafted_tokens=self.sequence.num_drafted,
            accepted_tokens=sum(step.is_drafted for step in steps),
            logprobs=None if request.params.logprobs is None else logprobs,
        )


class LatestOutputs:
    """The tokens of the latest outputs by their text.

    A text can be cut into tokens in several ways, and sampling may choose another one than the tokenizer does. The
    key-value cache holds an output only in the tokens that were generated.
    """

    def __init__(self) -> None:
        self.by_text: dict[str, tuple[int, ...]] = {}  # the oldest first
        self._lock = threading.Lock()

    def note(self, text: str, token_ids: list[int]) -> None:
        """Remember the tokens of an output, and forget the oldest output if there are many."""
        with self._lock:
            self.by_text.pop(text, None)
            self.by_text[text] = tuple(token_ids)
            if len(self.by_text) > MAX_OUTPUTS:
                del self.by_text[next(iter(self.by_text))]


class _StopStrings:
    """Finds stop strings in a growing text, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.complete = False  # whether one has come

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string; none after one has come."""
        if self.complete:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.complete = True
            certain, self._held = self._held[: min(places)], ""
            return certain
        longest = max((self._overlap(stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - longest], self._held[len(self._held) - longest :]
        return certain

    def flush(self) -> str:
        """What is still held when the output ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if self._held.endswith(stop[:size])), 0)


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
