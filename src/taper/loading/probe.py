"""Whether a tokenizer that loads also works: files can describe pipelines that fail on any text, or on most."""

from __future__ import annotations

import json
import math
from typing import Any

from ..errors import ModelError, RequestError
from .tokenizer import Tokenizer

MAX_GROWTH = 1000  # tokens or characters that a pipeline may make of one; real ones make one to three

_TEXTS = (
    *("", " ", "  two  spaces ", "\n", "\t\r\n\x0b", "\x00\x07\x1b[0m\x7f\x85", "The quick brown fox, didn't it?"),
    *("1", "0123456789 3.14 1,000", "naïve Ångström e\u0301 ÉCOLE", "Привет, мир! 日本語 العربية हिन्दी ไทย 한국어"),
    *("😀 👩\u200d👩\u200d👧 🇩🇪 ❤\ufe0f", "\ufffd\ufeff\u202e\u200b\U0010ffff", "<s></s><unk>[UNK]<|im_end|>▁"),
    *("a" * 300, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"),
)
_SAMPLE = 1000  # token ids decoded


def check_tokenizer(tokenizer: Tokenizer, source: object, vocab_size: int) -> None:
    """Encode and decode varied text once.

    Raises:
        ModelError: it fails, gives a token that the model does not have, or makes far too much of a text.
    """
    fast = tokenizer.fast
    highest = max(fast.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= vocab_size:
        raise ModelError(f"{source} has token id {highest}, but the model has {vocab_size} embeddings")
    for part in (fast.normalizer, fast.pre_tokenizer, fast.post_processor, fast.decoder):
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > MAX_GROWTH:
            raise ModelError(f"{source}: a text could grow {growth} times; at most {MAX_GROWTH} times is allowed")
    try:
        for text in _TEXTS:
            ids = tokenizer.encode(text)
            if (highest := max(ids, default=0)) >= vocab_size:
                raise ModelError(f"{source} gives token id {highest}, but the model has {vocab_size} embeddings")
            tokenizer.decode(ids)
            tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    except RequestError as error:
        raise ModelError(f"{source}: {error.message}", "take the model's own tokenizer") from None
    tokenizer.decode(range(0, vocab_size, max(1, vocab_size // _SAMPLE)))


def _growth(part: Any) -> int:
    """At most how much longer a part of a pipeline, as JSON, makes a text; a few added characters count as one."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    sizes = (len(part.get(key) or "") for key in ("content", "prepend", "single", "ids"))
    return math.prod(max(1, size) for size in sizes) * math.prod(map(_growth, part.values()))
