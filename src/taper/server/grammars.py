"""JSON schemas as filters of tokens: the only place that compiles a schema, or knows llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..errors import RequestError
from ..models.tokenizer import Tokenizer, texts_of

MAX_SCHEMA_CHARACTERS = 1 << 16
# JSON without spaces: a small model that may write spaces may write nothing else.
_COMPACT: Any = {"whitespace_flexible": False}


class Grammars:
    """Compiles JSON schemas for a model's tokens.

    The vocabulary is read when it is first needed, which takes half a second. Methods may be called by any thread.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, schema: dict[str, Any]) -> Callable[[], JsonFilter]:
        """A function that makes a filter for each completion that must keep a schema.

        Raises:
            RequestError: the schema is damaged, too large or nested too deep, or has an unsupported keyword.
        """
        texts_of([schema])  # rejects deep nesting
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise RequestError(f"the schema has {len(text)} characters; it may have at most {MAX_SCHEMA_CHARACTERS}")
        if not self._tokenizer.eos_token_ids:
            raise RequestError("this model has no token that ends an output, so JSON would never end")
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT)
        matcher = LLMatcher(self._read_vocabulary(), grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"outputs cannot keep this schema: {matcher.get_error()}")
        return lambda: JsonFilter(matcher.deep_copy(), self._vocab_size)

    def _read_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                ends = sorted(self._tokenizer.eos_token_ids)
                self._vocabulary = LLTokenizer(self._tokenizer.fast.to_str(), self._vocab_size, ends)
            return self._vocabulary


class JsonFilter:
    """A `TokenFilter` that allows tokens by which JSON of a schema goes on, and stop tokens where it may end."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def restrict(self, logits: np.ndarray) -> np.ndarray:
        """Logits float32 [vocab_size], -inf for tokens that break the schema; for all if it is too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        if self._matcher.is_error():
            allowed = np.zeros_like(allowed)
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token_id: int) -> None:
        """Advance by the token that was sampled."""
        self._matcher.consume_token(token_id)
