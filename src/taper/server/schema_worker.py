"""The script of the limited process in which `grammars.py` tries a JSON schema before it compiles it itself."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits

# JSON without spaces: a small model that may write spaces may write nothing else.
COMPACT: Any = {"whitespace_flexible": False}
# States take one or two kB each. Without large lexemes, compiling needs no vocabulary to be within limits.
LIMITS = LLParserLimits(max_lexer_states=20_000, precompute_large_lexemes=False, verbose_errors=False)


def reply(schema: dict[str, Any]) -> str:
    """What is wrong with a schema; "" if it can be compiled."""
    return LLMatcher.validate_grammar(
        LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT), limits=LIMITS
    )
