"""JSON schemas as filters of tokens: the only place that compiles a schema, or knows llguidance.

A schema of a few hundred bytes may take any time and memory to compile, and llguidance's own limits do not cover all of
it. So a process with limits tries it first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..errors import RequestError
from . import schema_worker
from .limited_process import LimitedProcess, LimitExceeded, Limits
from .tokenizer import Tokenizer, texts_of

MAX_SCHEMA_CHARACTERS = 1 << 16
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

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.fast.to_str(), self._vocab_size, sorted(self._tokenizer.eos_token_ids))

    def compile(self, schema: dict[str, Any]) -> Callable[[], GrammarFilter]:
        """A function that makes a filter for each completion that must keep a schema.

        Raises:
            RequestError: the schema is damaged, too large, nested too deep or too much work, or has an unsupported
                keyword.
        """
        texts_of([schema])  # rejects deep nesting
        return self._compile({"schema": schema_worker.simplified(schema)})

    def compile_calls(self, tools: dict[str, dict[str, Any]], only_one: bool) -> Callable[[], GrammarFilter]:
        """The same for completions that must call tools; `tools` has the schemas of their arguments, by name."""
        texts_of(list(tools.values()))
        calls = [{"name": name, "arguments": schema_worker.simplified(schema)} for name, schema in tools.items()]
        return self._compile({"calls": calls, "only_one": only_one})

    def _compile(self, request: dict[str, Any]) -> Callable[[], GrammarFilter]:
        text = json.dumps(request)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise RequestError(f"the schema has {len(text)} characters; it may have at most {MAX_SCHEMA_CHARACTERS}")
        if not self._tokenizer.eos_token_ids:
            raise RequestError("this model has no token that ends an output, so JSON would never end")
        try:
            problem = _PROCESS.ask(text)
        except LimitExceeded as error:
            problem = f"compiling it {error}"
        except OSError as error:
            raise RequestError(f"cannot start the process that tries schemas: {error.strerror}") from None
        if not problem:
            grammar = schema_worker.grammar(request)
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=schema_worker.LIMITS)
            problem = matcher.get_error()
        if problem:
            raise RequestError(f"outputs cannot keep this schema: {problem[:MAX_REASON]}")
        return lambda: GrammarFilter(matcher.deep_copy(), self._vocab_size)


class GrammarFilter:
    """A `TokenFilter` that allows tokens that continue a text of the grammar, and stop tokens where it may end."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

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
