"""Filling in what is missing between two texts (FIM), with the tokens that a model was trained on for it.

M. Bavarian et al., Efficient Training of Language Models to Fill in the Middle, arXiv 2207.14255. Other files come
first, as in the technical reports of StarCoder 2 and Qwen2.5-Coder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import RequestError
from .tokenizer import Tokenizer

# The tokens before the prefix, before the suffix, and before what is missing, as families of models spell them.
_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_REPOSITORY, _FILE = ("<|repo_name|>", "<repo_name>"), ("<|file_sep|>", "<file_sep>")
_PADDING = ("<|fim_pad|>", "<fim_pad>")
_NAME = "repository"  # as good as any


class InfillTokens(NamedTuple):
    """Token ids: before the prefix, the suffix, what is missing, a repository's name and a file; and those that end it.

    `repository` and `file` are None where the model knows only one file.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    ends: frozenset[int]


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens:
    """A model's tokens for filling in.

    Raises:
        RequestError: it has none.
    """

    def first(names: Sequence[str]) -> int | None:
        return next((tokenizer.added_token_ids[name] for name in names if name in tokenizer.added_token_ids), None)

    for names in _SPELLINGS:
        known = [tokenizer.added_token_ids.get(name) for name in names]
        prefix, suffix, middle = known
        if prefix is not None and suffix is not None and middle is not None:
            repository, file, padding = map(first, (_REPOSITORY, _FILE, _PADDING))
            ends = {token_id for token_id in (*known, repository, file, padding) if token_id is not None}
            has_files = repository is not None and file is not None
            return InfillTokens(
                prefix, suffix, middle, repository if has_files else None, file if has_files else None, frozenset(ends)
            )
    raise RequestError("this model has no tokens for filling in", "leave out the suffix, or take a model for code")


def encode_infill(
    tokenizer: Tokenizer, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = (), written: str = ""
) -> list[int]:
    """Token ids of a prompt that asks for what is missing.

    Args:
        tokenizer: the model's.
        prefix: the text before it.
        suffix: the text after it.
        files: names and texts of other files that help. A model that knows only one file gets them before the prefix.
        written: how what is missing begins.

    Raises:
        RequestError: the model has no tokens for it, or a text is not valid Unicode.
    """
    tokens = infill_tokens(tokenizer)

    def plain(text: str) -> list[int]:
        return tokenizer.encode_plain(text) if text else []

    ids = tokenizer.encode("")  # what begins each text
    if tokens.repository is not None and tokens.file is not None and files:
        ids += [tokens.repository, *plain(f"{_NAME}\n")]
        for name, text in files:
            ids += [tokens.file, *plain(f"{name}\n{text}")]
        ids.append(tokens.file)
    else:
        prefix = "".join(f"{text}\n" for _, text in files) + prefix
    return [*ids, tokens.prefix, *plain(prefix), tokens.suffix, *plain(suffix), tokens.middle, *plain(written)]
