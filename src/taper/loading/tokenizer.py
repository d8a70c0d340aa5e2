"""Text <-> token ids, and chat templates. The reference is each model's own `tokenizer.json`.

A GGUF file carries vocabulary and merges but names its pre-tokenizer only; the pipelines it may name are
rebuilt here with the `tokenizers` library, which also reads `tokenizer.json` itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from ..errors import ModelError, RequestError

Message = dict[str, str]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLIT_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SPLIT_TAIL
_QWEN2_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SPLIT_TAIL

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")

# Token types of GGUF's tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# Ends of a turn that some files do not list among their stop ids.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        fast: the `tokenizers` pipeline.
        stop_ids: ids that end an answer.
        chat_template: jinja2 source, "" where the model has none.
        template_tokens: special tokens by the names templates use (`bos_token`, `eos_token`).
    """

    def __init__(
        self, fast: FastTokenizer, stop_ids: frozenset[int], chat_template: str, template_tokens: dict[str, str]
    ) -> None:
        self.fast = fast
        self.stop_ids = stop_ids
        self.chat_template = chat_template
        self._template_tokens = template_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's own leading tokens (BOS) where it has them.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        try:
            ids: list[int] = self.fast.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # what the library makes of lone surrogates
            raise RequestError("the prompt is not valid Unicode text", "give it as UTF-8") from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out. Bytes that are no character become U+FFFD."""
        text: str = self.fast.decode(list(ids), skip_special_tokens=True)
        if "\ufffd" not in text or not getattr(self.fast.model, "byte_fallback", False):
            return text
        # One bad byte makes the library spoil its whole run of byte tokens; keep the run's good characters.
        special = {i for i, token in self.fast.get_added_tokens_decoder().items() if token.special}
        pieces = [piece for i in ids if i not in special and (piece := self.fast.id_to_token(i)) is not None]
        joined: list[str] = []
        for is_byte, group in groupby(pieces, lambda piece: bool(_BYTE_PIECE.fullmatch(piece))):
            run = list(group)
            joined += [bytes(int(piece[3:5], 16) for piece in run).decode(errors="replace")] if is_byte else run
        mended: str = self.fast.decoder.decode(joined)
        return mended

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a conversation, ready for the assistant's answer.

        Raises:
            RequestError: the model has no chat template, or the template refuses these messages.
        """
        if not self.chat_template:
            raise RequestError("this model has no chat template", "give plain text instead of messages")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            template = environment.from_string(self.chat_template)
            absent = {"tools": None, "documents": None}  # templates test them for none, as transformers gives them
            given = {"messages": list(messages), "add_generation_prompt": True, **self._template_tokens, **absent}
            return template.render(given)
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            reason = str(error) or type(error).__name__
            raise RequestError(f"the model's chat template refused these messages: {reason}") from None


class TextStream:
    """Turns ids into text as they come, never half a character.

    Some tokens hold only part of a character; their text waits until the rest has come.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._anchor = 0  # decoding starts here: one piece of text earlier than what is still held
        self._done = 0  # tokens whose text was given out
        self._prefix = ""  # text of the tokens from anchor to done

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids[self._anchor :])
        if text.endswith("\ufffd") or len(text) <= len(self._prefix):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The text still held at the end of an answer."""
        return self._emit(self._tokenizer.decode(self._ids[self._anchor :]))

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._anchor, self._done = self._done, len(self._ids)
        self._prefix = self._tokenizer.decode(self._ids[self._anchor :])
        return new


def tokenizer_from_folder(path: Path, vocab_size: int) -> Tokenizer:
    """Read `tokenizer.json` and the chat template beside it.

    Raises:
        ModelError: the file is missing or damaged, or has more tokens than the model.
    """
    file = path / "tokenizer.json"
    try:
        fast = FastTokenizer.from_str(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} has no tokenizer.json", "save the model's fast tokenizer beside it") from None
    except Exception as error:  # the library raises bare Exception for bad files
        raise ModelError(f"cannot read {file}: {error}") from None
    fast.no_truncation()
    fast.no_padding()
    _check_size(fast, vocab_size, str(file))
    settings = _optional_json(path / "tokenizer_config.json")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several named templates
        named = [entry for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        if len(named) != len(template):
            raise ModelError(f"{path}: a chat template of a list must have a name")
        template = next((entry.get("template") for entry in named if entry["name"] == "default"), "")
    try:
        if (path / "chat_template.jinja").is_file():
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path / 'chat_template.jinja'}: {error}") from None
    if not isinstance(template, str):
        raise ModelError(f"{path}: the chat template must be text")
    tokens = {}
    for name in ("bos_token", "eos_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value.encode(errors="replace").decode()
    stops: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = _optional_json(path / name).get("eos_token_id")
        stops.update(i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0)
    stops |= _end_of_turn_ids(fast, tokens.get("eos_token"))
    return Tokenizer(fast, frozenset(stops), template, tokens)


def tokenizer_from_gguf(file_name: str, metadata: dict[str, Any], vocab_size: int) -> Tokenizer:
    """Rebuild the tokenizer that a GGUF file describes.

    Raises:
        ModelError: metadata is missing or damaged, or names a tokenizer that is not supported.
    """

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = metadata.get(f"tokenizer.{key}", default)
        if value is None:
            raise ModelError(f"{file_name} lacks the metadata key tokenizer.{key}")
        if type(value) is not kind:
            raise ModelError(f"{file_name}: metadata tokenizer.{key} must be of type {kind.__name__}")
        return value

    model, pieces = get("ggml.model", str), get("ggml.tokens", list)
    types = get("ggml.token_type", list, [1] * len(pieces))
    of_type = all(isinstance(piece, str) for piece in pieces) and all(isinstance(kind, int) for kind in types)
    if not pieces or len(types) != len(pieces) or not of_type:
        raise ModelError(f"{file_name}: tokenizer tokens and token types do not match")
    if len(set(pieces)) != len(pieces):
        raise ModelError(f"{file_name}: two tokens of the vocabulary are the same")
    if len(pieces) > vocab_size:
        raise ModelError(f"{file_name}: {len(pieces)} tokens, but embeddings for {vocab_size}")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    bos = _special_id(file_name, metadata, "bos_token_id", len(pieces))
    eos = _special_id(file_name, metadata, "eos_token_id", len(pieces))
    if model == "gpt2":
        fast = _byte_level_bpe(file_name, get("ggml.pre", str, "default"), vocab, get("ggml.merges", list))
        add_bos = get("ggml.add_bos_token", bool, metadata.get("tokenizer.ggml.pre") == "llama-bpe")
    elif model == "llama":
        scores = get("ggml.scores", list)
        prefix_space = get("ggml.add_space_prefix", bool, True)
        fast = _sentencepiece_bpe(file_name, vocab, types, scores, prefix_space)
        add_bos = get("ggml.add_bos_token", bool, True)
    else:
        raise ModelError(f"tokenizer model {model!r} is not supported", "supported: gpt2, llama")
    for kind, special in ((_CONTROL, True), (_UNKNOWN, True), (_USER_DEFINED, False)):
        found = [piece for piece, token_type in zip(pieces, types, strict=True) if token_type == kind and piece]
        fast.add_tokens([AddedToken(piece, special=special, normalized=False) for piece in found])
    if add_bos and bos is not None:
        from tokenizers.processors import TemplateProcessing

        token = pieces[bos]
        fast.post_processor = TemplateProcessing(
            single=f"{_template_piece(token)} $A", pair=None, special_tokens=[(token, bos)]
        )
    stops = (eos, _special_id(file_name, metadata, "eot_token_id", len(pieces)))
    tokens = {name: pieces[i] for name, i in (("bos_token", bos), ("eos_token", eos)) if i is not None}
    stop_ids = frozenset(i for i in stops if i is not None) | _end_of_turn_ids(fast, None)
    return Tokenizer(fast, stop_ids, get("chat_template", str, ""), tokens)


def _byte_level_bpe(file_name: str, pre: str, vocab: dict[str, int], merges: list[Any]) -> FastTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipelines: dict[str, list[Any]] = {
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), byte_level],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), byte_level],
    }
    if pre not in pipelines:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported", f"supported: {', '.join(pipelines)}")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not space or " " in right:
            raise ModelError(f"{file_name}: tokenizer merge {merge!r} is not a pair of tokens")
        pairs.append((left, right))
    try:
        fast = FastTokenizer(models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception for merges outside the vocabulary
        raise ModelError(f"{file_name}: tokenizer merges are damaged: {error}") from None
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(pipelines[pre])
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece_bpe(
    file_name: str, vocab: dict[str, int], types: list[Any], scores: list[Any], prefix_space: bool
) -> FastTokenizer:
    if len(scores) != len(vocab) or not all(isinstance(score, float) for score in scores):
        raise ModelError(f"{file_name}: tokenizer scores do not match its tokens")
    by_id = list(vocab)
    unknown = next((by_id[index] for index, token_type in enumerate(types) if token_type == _UNKNOWN), None)
    # Only pieces found by merging take part; a merge is as good as the score of what it makes.
    plain = {piece for piece, index in vocab.items() if types[index] == 1}
    merges = []
    for piece in plain:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in plain and right in plain:
                merges.append((-scores[vocab[piece]], vocab[left], vocab[right], (left, right)))
    merges.sort()
    fast = FastTokenizer(
        models.BPE(
            vocab, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in set(types)
        )
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix_space else []
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence(decoding + ([decoders.Strip(" ", 1, 0)] if prefix_space else []))
    return fast


def _special_id(file_name: str, metadata: dict[str, Any], name: str, size: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < size:
        raise ModelError(f"{file_name}: {name} is {token_id!r}; the vocabulary has {size} tokens")
    return token_id


def _template_piece(token: str) -> str:
    # TemplateProcessing splits on spaces and reads $ and : itself; real BOS tokens have none of them.
    if any(character in token for character in " $:"):
        raise ModelError(f"BOS token {token!r} cannot be put before a prompt")
    return token


def _end_of_turn_ids(fast: FastTokenizer, eos_token: str | None) -> set[int]:
    names = [*_END_OF_TURN, *([eos_token] if eos_token else [])]
    return {token_id for name in names if (token_id := fast.token_to_id(name)) is not None}


def _check_size(fast: FastTokenizer, vocab_size: int, file_name: str) -> None:
    highest = max(fast.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= vocab_size:
        raise ModelError(f"{file_name} has token id {highest}, but the model has {vocab_size} embeddings")


def _optional_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    return data if isinstance(data, dict) else {}


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> Callable[..., Any]:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
