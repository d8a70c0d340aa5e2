"""Tokenizers from files.

The `tokenizers` library reads `tokenizer.json` itself. A GGUF file holds a vocabulary and merges, and only the name of
its pre-tokenizer; the pipelines of those names are rebuilt here to equal each model's own `tokenizer.json`.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from ..errors import ModelError, RequestError
from .call_forms import CLOSE, OPEN
from .channels import MESSAGE_END, OUTPUT_ENDS
from .files import Settings, read_json, read_text
from .tokenizer import Tokenizer, loading_tokenizer

MAX_TOKENIZER_BYTES = 64 << 20  # of tokenizer.json; twice the largest real one
# Limits of a SentencePiece vocabulary: characters of a piece and of all pieces, and merges of two pieces into another.
# Vocabularies of 256,000 pieces have about 64, 2 million and 600,000.
MAX_PIECE, MAX_PIECES, MAX_MERGES = 256, 1 << 22, 1 << 20
MAX_GROWTH = 1000  # tokens or characters that a pipeline may make of one character; real ones make one to three

# Text that the check encodes and decodes.
_TEXTS = (
    *("", " ", "  two  spaces ", "\n", "\t\r\n\x0b", "\x00\x07\x1b[0m\x7f\x85", "The quick brown fox, didn't it?"),
    *("1", "0123456789 3.14 1,000", "naïve Ångström e\u0301 ÉCOLE", "Привет, мир! 日本語 العربية हिन्दी ไทย 한국어"),
    *("😀 👩\u200d👩\u200d👧 🇩🇪 ❤\ufe0f", "\ufffd\ufeff\u202e\u200b\U0010ffff", "<s></s><unk>[UNK]<|im_end|>▁"),
    *("a" * 300, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"),
)
_SAMPLE = 1000  # token ids to decode

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLIT_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SPLIT_TAIL
_SEED_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SPLIT_TAIL
_QWEN35_SPLIT = _QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# Lowercase words that may begin with capitals, then words in capitals that may end in lowercase letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + f"{_UPPER}*{_LOWER}+%s|" + r"[^\r\n\p{L}\p{N}]?" + f"{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = _SPLIT_TAIL.replace(r"[\r\n]*", r"[\r\n/]*")
_GPT4O_SPLIT = _CASED.replace("%s", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _CASED_TAIL
_TEKKEN_SPLIT = _CASED.replace("%s", "") + r"|\p{N}" + _CASED_TAIL

_HUNYUAN_SPLITS = (  # of DeepSeek V3 too
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# By GGUF's names of pre-tokenizers: the patterns that split a text into words before merging, one after the other.
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "lfm2": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,  # SmolLM3
    "dbrx": _LLAMA3_SPLIT,  # Phi 4, OLMo 2
    "glm4": _LLAMA3_SPLIT,
    "chatglm-bpe": _LLAMA3_SPLIT,
    "seed-coder": _SEED_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "qwen35": _QWEN35_SPLIT,
    "hunyuan-dense": _HUNYUAN_SPLITS,
    "gpt-4o": _GPT4O_SPLIT,  # Phi 4 mini
    "llama4": _GPT4O_SPLIT,
    "tekken": _TEKKEN_SPLIT,  # Mistral Nemo and Small
}
_DIGITS_APART = ("smollm", "refact")  # then GPT-2's splits; refact: Granite
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")  # normalise to NFC
# A word of the vocabulary is one token, whatever the merges say.
_WHOLE_WORDS = ("llama-bpe", "llama4", "lfm2", "falcon3", "smaug-bpe", "tekken", "glm4")
_BOS_LEADS = ("llama-bpe", "llama4", "lfm2", "tekken")  # BOS leads, unless the file says otherwise
# Token types of GGUF's tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
# Tokens that end a turn, which some files do not list among their stop ids.
_END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|end|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<|eom|>"),  # Phi, Gemma, Gemma 4, Llama 4
    *("<|eom_id|>", "<end_of_utterance>", "<EOT>"),  # Llama's calls of tools, SmolVLM, and files of llama.cpp
)
_ENDS = ("eos", "eot", "eom")  # tokens that end an output, by GGUF's names: of text, of a turn, of a message
# Special tokens by the names that templates use, and their names in GGUF, where these differ.
_TEMPLATE_TOKENS = {
    **{f"{name}_token": name for name in ("bos", "eos", "cls", "mask")},
    "unk_token": "unknown",
    "sep_token": "seperator",  # so spelled
    "pad_token": "padding",
}
_TOOL_USE = "tool_use"


def tokenizer_from_folder(path: Path, vocab_size: int) -> Tokenizer:
    """Read `tokenizer.json` and the chat template beside it.

    Raises:
        ModelError: the file is missing or damaged, has more tokens than the model, or does not work.
    """
    file = path / "tokenizer.json"
    settings = read_json(path / "tokenizer_config.json", missing={})
    template, tool_use = _folder_templates(path, settings)
    tokens = {}
    for source in (read_json(path / "special_tokens_map.json", missing={}), settings):  # the latter wins
        for name in _TEMPLATE_TOKENS:
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[name] = value.encode(errors="replace").decode()
    stops: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = read_json(path / name, missing={}).get("eos_token_id")
        stops.update(i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0)
    with loading_tokenizer(file):
        fast = FastTokenizer.from_str(read_text(file, MAX_TOKENIZER_BYTES))
        fast.no_truncation()
        fast.no_padding()
        if (eos := fast.token_to_id(tokens.get("eos_token", ""))) is not None:
            stops.add(eos)
        declared = frozenset(stops)
        tokenizer = Tokenizer(
            _with_tags_as_text(fast), declared | _end_of_turn_ids(fast), template, tokens, declared, tool_use
        )
        _check(tokenizer, file, vocab_size)
    return tokenizer


def _folder_templates(path: Path, settings: dict[str, Any]) -> tuple[str, str]:
    """The chat template, and the one for requests with tools; "" where there is none."""
    template = settings.get("chat_template") or ""
    templates = {"default": template}
    if isinstance(template, list):  # several named templates
        named = [entry for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        if len(named) != len(template):
            raise ModelError(f"{path}: a chat template of a list must have a name")
        templates = {entry["name"]: entry.get("template") for entry in named}
    for name, file in (
        ("default", path / "chat_template.jinja"),
        (_TOOL_USE, path / "additional_chat_templates" / f"{_TOOL_USE}.jinja"),
    ):
        if os.path.lexists(file):
            templates[name] = read_text(file)
    default, tool_use = templates.get("default", ""), templates.get(_TOOL_USE, "")
    if not (isinstance(default, str) and isinstance(tool_use, str)):
        raise ModelError(f"{path}: the chat template must be text")
    return default, tool_use


def tokenizer_from_gguf(metadata: Settings, vocab_size: int) -> Tokenizer:
    """Rebuild the tokenizer that the metadata of a GGUF file describe.

    Raises:
        ModelError: metadata is missing or damaged, or names a tokenizer that is not supported or does not work.
    """
    with loading_tokenizer(metadata.source):
        tokenizer = _rebuild(metadata, vocab_size)
        _check(tokenizer, metadata.source, vocab_size)
    return tokenizer


def _rebuild(settings: Settings, vocab_size: int) -> Tokenizer:
    get, source = settings.get, settings.source
    pieces = get("tokenizer.ggml.tokens", list)
    types = get("tokenizer.ggml.token_type", list, [_NORMAL] * len(pieces))
    well_typed = all(isinstance(piece, str) for piece in pieces) and all(isinstance(kind, int) for kind in types)
    if not pieces or len(types) != len(pieces) or not well_typed:
        raise ModelError(f"{source}: tokenizer tokens and token types do not match")
    if len(set(pieces)) != len(pieces):
        raise ModelError(f"{source}: two tokens of the vocabulary are the same")
    if len(pieces) > vocab_size:
        raise ModelError(f"{source}: {len(pieces)} tokens, but embeddings for {vocab_size}")
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = get("tokenizer.ggml.model", str)
    if model == "gpt2":
        pre = get("tokenizer.ggml.pre", str, "default")
        fast, leads = _byte_level_bpe(settings, pre, vocab), pre in _BOS_LEADS
    elif model == "llama":
        fast, leads = _sentencepiece_bpe(settings, vocab, types), True
    elif model == "gemma4":
        fast, leads = _gemma_bpe(settings, vocab, types), True
    else:
        raise ModelError(f"tokenizer model {model!r} is not supported", "supported: gemma4, gpt2, llama")
    for kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
        of_kind = [piece for piece, token_type in zip(pieces, types, strict=True) if token_type == kind and piece]
        fast.add_tokens([AddedToken(piece, special=kind != _USER_DEFINED, normalized=False) for piece in of_kind])
    bos, *ends = (_special_id(settings, name, len(pieces)) for name in ("bos", *_ENDS))
    if get("tokenizer.ggml.add_bos_token", bool, leads) and bos is not None:
        token = pieces[bos]
        if any(character in token for character in " $:"):  # these have a meaning in TemplateProcessing
            raise ModelError(f"BOS token {token!r} cannot be put before a prompt")
        tokens_before = {"single": f"{token} $A", "pair": None, "special_tokens": [(token, bos)]}
        fast.post_processor = processors.TemplateProcessing(**tokens_before)
    ids = {ours: settings.values.get(f"tokenizer.ggml.{name}_token_id") for ours, name in _TEMPLATE_TOKENS.items()}
    tokens = {name: pieces[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(pieces)}
    declared = frozenset(i for i in ends if i is not None)
    template, tool_use = (get(f"tokenizer.chat_template{name}", str, "") for name in ("", f".{_TOOL_USE}"))
    return Tokenizer(_with_tags_as_text(fast), declared | _end_of_turn_ids(fast), template, tokens, declared, tool_use)


def _with_tags_as_text(fast: FastTokenizer) -> FastTokenizer:
    """The pipeline with the tags of tool calls as parts of texts: outputs leave out control tokens, as some files say.

    It is another one only if they are control tokens.
    """
    added = fast.get_added_tokens_decoder().values()
    if not (hidden := [token.content for token in added if token.special and token.content in (OPEN, CLOSE)]):
        return fast
    fast.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in hidden])
    return FastTokenizer.from_str(fast.to_str())  # the library sees the change only then


def _byte_level_bpe(settings: Settings, pre: str, vocab: dict[str, int]) -> FastTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipelines: dict[str, list[Any]] = {"gpt-2": [gpt2], "olmo": [gpt2]}
    pipelines |= {name: [pre_tokenizers.Digits(individual_digits=True), gpt2] for name in _DIGITS_APART}
    for name, splits in _SPLITS.items():
        patterns = (splits,) if isinstance(splits, str) else splits
        pipelines[name] = [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns), byte_level]
    if pre not in pipelines:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported", f"supported: {', '.join(pipelines)}")
    fast = FastTokenizer(models.BPE(vocab, _merges(settings), ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(pipelines[pre])
    fast.decoder = decoders.ByteLevel()
    return fast


def _merges(settings: Settings) -> list[tuple[str, str]]:
    pairs = []
    for merge in settings.get("tokenizer.ggml.merges", list):
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not space or " " in right:
            raise ModelError(f"{settings.source}: tokenizer merge {merge!r} is not a pair of tokens")
        pairs.append((left, right))
    return pairs


def _gemma_bpe(settings: Settings, vocab: dict[str, int], types: list[Any]) -> FastTokenizer:
    unknown = next((piece for piece, kind in zip(vocab, types, strict=True) if kind == _UNKNOWN), None)
    fast = FastTokenizer(models.BPE(vocab, _merges(settings), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


def _sentencepiece_bpe(settings: Settings, vocab: dict[str, int], types: list[Any]) -> FastTokenizer:
    scores, source = settings.get("tokenizer.ggml.scores", list), settings.source
    prefix_space = settings.get("tokenizer.ggml.add_space_prefix", bool, True)
    if len(scores) != len(vocab) or not all(isinstance(score, float) for score in scores):
        raise ModelError(f"{source}: tokenizer scores do not match its tokens")
    by_id = list(vocab)
    unknown = next((by_id[index] for index, token_type in enumerate(types) if token_type == _UNKNOWN), None)
    # Only pieces made by merging take part. A merge ranks by the score of the piece that it makes.
    plain = {piece: piece for piece, index in vocab.items() if types[index] == _NORMAL}
    if (longest := max(map(len, plain), default=0)) > MAX_PIECE:
        raise ModelError(f"{source}: a token of {longest} characters; at most {MAX_PIECE} are read")
    if (total := sum(map(len, plain))) > MAX_PIECES:
        raise ModelError(f"{source}: tokens of {total} characters in all; at most {MAX_PIECES} are read")
    merges = []
    for piece in plain:
        for cut in range(1, len(piece)):
            left, right = plain.get(piece[:cut]), plain.get(piece[cut:])
            if left and right:
                merges.append((-scores[vocab[piece]], vocab[left], vocab[right], (left, right)))
        if len(merges) > MAX_MERGES:
            raise ModelError(f"{source}: its tokens merge in more than {MAX_MERGES} ways")
    merges.sort()
    pairs, bytes_too = [pair for *_, pair in merges], _BYTE in set(types)
    fast = FastTokenizer(models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix_space else []
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence(decoding + ([decoders.Strip(" ", 1, 0)] if prefix_space else []))
    return fast


def _special_id(settings: Settings, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = settings.values.get(key)
    if token_id is not None and not (type(token_id) is int and 0 <= token_id < vocab_size):
        raise settings.error(key, f"the vocabulary has {vocab_size} tokens")
    return token_id


def _end_of_turn_ids(fast: FastTokenizer) -> set[int]:
    ids = {name: fast.token_to_id(name) for name in (*_END_OF_TURN, *OUTPUT_ENDS)}
    if all(ids[name] is not None for name in OUTPUT_ENDS):  # then an output may have several messages
        ids[MESSAGE_END] = None
    return {token_id for token_id in ids.values() if token_id is not None}


def _check(tokenizer: Tokenizer, source: object, vocab_size: int) -> None:
    """Reject a tokenizer that cannot encode and decode varied text, or makes a text far too long."""
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
    """An upper bound of the factor by which a part of a pipeline, given as JSON, lengthens a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    sizes = (len(part.get(key) or "") for key in ("content", "prepend", "single", "ids"))
    return math.prod(max(1, size) for size in sizes) * math.prod(map(_growth, part.values()))
