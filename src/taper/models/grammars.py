"""JSON schemas as filters of tokens: the only place that compiles a schema, or knows llguidance.

A schema of a few hundred bytes may take any time and memory to compile, and llguidance's own limits do not cover all of
it. So a process with limits tries it first.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..errors import RequestError
from . import schema_worker
from .call_forms import CLOSE, OPEN, TAGGED_HEAD, find_call, undecided
from .channels import CHANNEL, MESSAGE
from .limited_process import LimitedProcess, LimitExceeded, Limits
from .tokenizer import ChannelStream, Tokenizer, texts_of

MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_COMPILED = 64  # requests whose grammars are kept
MAX_REASON = 1000  # characters of what is wrong with a schema
MAX_SECONDS, MAX_MEGABYTES = 2.0, 512
# What is added to the logits of eight tokens, by the byte that says which of them are allowed: [256, 8].
_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(
    np.float32
)
_PROCESS = LimitedProcess(Path(schema_worker.__file__), Limits(MAX_SECONDS, MAX_MEGABYTES))


class Grammars:
    """Compiles JSON schemas for a model's tokens; the first use reads its vocabulary, which takes half a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: dict[str, LLMatcher] = {}  # by request, the latest last

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return LLTokenizer(
            self._tokenizer.without_control_texts, self._vocab_size, sorted(self._tokenizer.eos_token_ids)
        )

    def compile(self, schema: dict[str, Any], goes_on: bool = False) -> Callable[[], GrammarFilter]:
        """A function that makes a filter for each completion that must keep a schema, and may go on from its prompt.

        Raises:
            RequestError: the schema is damaged, too large, nested too deep or too much work, or has an unsupported
                keyword.
        """
        texts_of([schema])  # rejects deep nesting
        matcher = self._compile({"schema": schema_worker.simplified(schema)} | ({} if goes_on else self._channels))
        return lambda: GrammarFilter(matcher.deep_copy(), self._vocab_size)

    def compile_calls(
        self, tools: dict[str, dict[str, Any]], only_one: bool, required: bool
    ) -> Callable[[], GrammarFilter | CallFilter]:
        """The same for completions that may call tools; `tools` has the schemas of their arguments, by name.

        If calls are `required`, the completion is nothing else. Otherwise it is any text, and a call keeps its schema
        from the place on from which it can be nothing but a call.
        """
        texts_of(list(tools.values()))
        if self._channels and not required:
            return self._compile_arguments(tools, only_one)
        calls = [{"name": name, "arguments": schema_worker.simplified(schema)} for name, schema in tools.items()]
        tags = [self._tokenizer.fast.token_to_id(text) or text for text in (OPEN, CLOSE)]
        tagged = self._compile({"calls": calls, "only_one": only_one or not required, "tags": tags} | self._channels)
        if required:
            return lambda: GrammarFilter(tagged.deep_copy(), self._vocab_size)
        bare = self._compile({"calls": calls, "only_one": True, "tags": []})
        opening = [tag] if isinstance(tag := tags[0], int) else self._vocabulary.tokenize_str(OPEN)

        def begun(form: str, text: str) -> GrammarFilter | None:
            """A filter for a call that begins with this text, after its tag; None if the text breaks its grammar."""
            matcher = (tagged if form == "tagged" else bare).deep_copy()
            token_ids = [*(opening if form == "tagged" else ()), *self._vocabulary.tokenize_str(text)]
            whole = matcher.try_consume_tokens(token_ids) == len(token_ids)
            return GrammarFilter(matcher, self._vocab_size) if whole else None

        return lambda: CallFilter(self._tokenizer, tools, begun, only_one)

    @property
    def _channels(self) -> dict[str, Any]:
        """What requests say of the channels that outputs have."""
        names = self._tokenizer.added_token_ids
        return {"channels": [names[CHANNEL], names[MESSAGE]]} if self._tokenizer.has_channels else {}

    def _compile_arguments(self, tools: dict[str, dict[str, Any]], only_one: bool) -> Callable[[], CallFilter]:
        """Filters that hold from the end of a call's header on, as that is where it can be nothing else."""
        schemas = {name: schema_worker.simplified(schema) for name, schema in tools.items()}
        matchers = {name: self._compile({"schema": schema, "any_spaces": True}) for name, schema in schemas.items()}

        def begun(form: str, text: str) -> GrammarFilter | None:
            head = TAGGED_HEAD.match(OPEN + text + "{") if form == "tagged" else None
            matcher = matchers.get(head[1]) if head else None
            return None if matcher is None else GrammarFilter(matcher.deep_copy(), self._vocab_size)

        return lambda: CallFilter(self._tokenizer, tools, begun, only_one)

    def _compile(self, request: dict[str, Any]) -> LLMatcher:
        text = json.dumps(request)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise RequestError(f"the schema has {len(text)} characters; it may have at most {MAX_SCHEMA_CHARACTERS}")
        if not self._tokenizer.eos_token_ids:
            raise RequestError("this model has no token that ends an output, so JSON would never end")
        matcher = self._compiled.pop(text, None) or self._compile_new(text)
        self._compiled[text] = matcher  # the latest last: clients send the same tools with each request
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.pop(next(iter(self._compiled)))
        return matcher

    def _compile_new(self, text: str) -> LLMatcher:
        try:
            problem = _PROCESS.ask(text)
        except LimitExceeded as error:
            problem = f"compiling it {error}"
        except OSError as error:
            raise RequestError(f"cannot start the process that tries schemas: {error.strerror}") from None
        if not problem:
            grammar = schema_worker.grammar(json.loads(text))
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=schema_worker.LIMITS)
            problem = matcher.get_error()
        if problem:
            raise RequestError(f"outputs cannot keep this schema: {problem[:MAX_REASON]}")
        return matcher


class GrammarFilter:
    """A `TokenFilter` that allows tokens that continue a text of the grammar, and stop tokens where it may end."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def has_ended(self) -> bool:
        """Whether nothing can continue the text."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> GrammarFilter:
        """A filter of its own for the same text so far."""
        return GrammarFilter(self._matcher.deep_copy(), self._vocab_size)

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """Logits float32 [vocab_size], -inf for tokens that break the schema; for all if it is too complex."""
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            allowed = np.zeros_like(allowed)
        restricted: np.ndarray = logits + _ADDED[allowed].reshape(-1)[: self._vocab_size]
        return restricted

    def accept(self, token_id: int) -> None:
        """Advance by the token that was sampled."""
        self._matcher.consume_token(token_id)

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first one on, keep the schema one after the other."""
        return int(self._matcher.validate_tokens(token_ids))


class CallFilter:
    """A `TokenFilter` that allows everything until a tool call begins, and from there on what continues the call.

    Args:
        tokenizer: the model's.
        names: of the tools.
        begun: makes the filter of a call from its form and its text so far.
        only_one: the output ends with its first call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        names: Collection[str],
        begun: Callable[[str, str], GrammarFilter | None],
        only_one: bool,
    ) -> None:
        self._tokenizer, self._names, self._begun, self._only_one = tokenizer, names, begun, only_one
        self._text = "\n"  # text that may begin a call; the output begins a line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._channels = ChannelStream(tokenizer) if tokenizer.has_channels else None
        self._call: GrammarFilter | None = None

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """Logits float32 [vocab_size], themselves outside of a call; within, -inf for tokens that break it."""
        return logits if self._call is None else self._call.restrict(logits)

    def accept(self, token_id: int) -> None:
        """Advance by the token that was sampled."""
        if self._call is not None:
            self._call.accept(token_id)
            if self._call.has_ended and not self._only_one:
                self._call, self._text = None, "\n"
            return
        if self._channels is None:
            self._text += self._decoder.decode(self._tokenizer.token_bytes(token_id))
        else:
            self._text += self._channels.push(token_id)
        if (call := find_call(self._text, self._names)) is not None:
            self._call = self._begun(call.form, self._text[call.object :])
            self._text = ""
        self._text = self._text[undecided(self._text) :]

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first one on, may come one after the other."""
        trial = copy(self)
        trial._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        trial._decoder.setstate(self._decoder.getstate())
        trial._channels = None if self._channels is None else self._channels.copy()
        trial._call = None if self._call is None else self._call.copy()
        for count, token_id in enumerate(token_ids):
            if trial._call is not None and not trial._call.num_allowed([token_id]):
                return count
            trial.accept(token_id)
        return len(token_ids)
