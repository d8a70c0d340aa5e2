"""Tokenizers rebuilt from GGUF equal reference implementations; text streams in whole characters."""

from __future__ import annotations

import io
import json
import random
import unicodedata
from itertools import pairwise

import pytest
import regex
import sentencepiece
from tiny import byte_tokenizer
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import GemmaTokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from taper.errors import ModelError, RequestError
from taper.models.files import Settings
from taper.models.tokenizer import TextStream, Tokenizer
from taper.models.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

# fmt: off
HARD = [
    "", " ", "  ", "a", "Hello world", " leading", "trailing ", "  both  ", "\n", "\n\n\n", "\t\t", " \n \n ", "\r\n",
    "line\r\nline\r\n\r\nend", "a\rb", "tab\tbetween", "    four spaces", "a  b   c    d", "end of line   \nnext",
    "\u00a0nbsp\u00a0", "em\u2003space\u3000wide", "\x0bvertical\x0cfeed", "\x1c\x1d\x85\u180e", "\x00nul\x7f",
    "I'm you're he'll we've I'd it's don't", "I'M YOU'RE HE'LL WE'VE I'D IT'S DON'T", "'s't're", "''s 'S 'x", "o'ſt",
    "rock 'n' roll 'tis", "it’s curly", "1", "12", "123", "1234", "1234567890", "3.14159", "1,000,000", "-42",
    "v2beta3", "a1b22c333d4444", "2024-01-31T23:59:59Z", "0xDEADBEEF", "1e-10", "x²+y³=½", "Ⅷ ⅻ ①②③", "٣٤٥ ४५६ 一二三",
    "１２３ full width", "  7", "7  ", "$5.00!", "50%", "hello,world", "wait... what?!", "!!!\n???", "(a) [b] {c}",
    "#include <stdio.h>\nint main(void) {\n\treturn 0;\n}", "def f(x):\n    return x ** 2  # square\n",
    "SELECT * FROM t WHERE id = 'x';", '<div class="a">&nbsp;</div>', 'println!("{:?}", vec![1u8; 3]);',
    "const f = async (x) => await x?.y ?? 0;", '{"key": [1, null, true]}', "https://example.org/a_b?c=d&e=%20#f",
    "snake_case camelCase PascalCase kebab-case", "C:\\Users\\me.txt", "$$\\int_0^1 x\\,dx$$", "```py\nx\n```",
    "日本語のテキスト", "中文字符，标点。", "한국어 문장", "ภาษาไทย", "हिन्दी में पाठ", "العربية والأرقام", "עברית",
    "ελληνικά", "Привет, мир!", "Tiếng Việt", "ქართული", "አማርኛ", "தமிழ்", "бълг'с", "中1文23字456", "naïve Ångström",
    "e\u0301 vs \u00e9", "A\u030a o\u0308", "\u1112\u1161\u11ab vs 한", "\u212b \u2126 ﬁ ﬃ", "\u0301alone",
    "Z\u0351\u036ba\u0301\u0302\u0303lgo", "a\u200bb\u200cc\u200dd\ufeffe", "\u202eright\u202c\u2066", "\ufffd",
    "q\u0307\u0323", "a\ufffd\ufffdb", "▁", "▁under▁ ▁▁ score", "😀", "😀😃😄", "👩\u200d👩\u200d👧\u200d👦 family",
    "👍🏽👍🏿", "🇩🇪🇯🇵", "❤\ufe0f vs ❤", "1\ufe0f\u20e3#\ufe0f\u20e3", "👩🏾\u200d💻codes", "\U0001d54f\U0001d7d9",
    "𠮷野家", "supercalifragilistic" * 8, "a" * 300, "日" * 60, " " * 70 + "x", "=" * 80, "aaa aaaa ababab",
    "\U000e0041\U0010ffff", "<|im_start|>user\nHi<|im_end|>\n", "a<|im_start|>b", "<|im_start|><|im_start|>", "<|im_st",
    " <|endoftext|> ", "<think>\n<think>x</think>", "<think", "e\u0301<|im_end|>\u0301", "<s>a</s><unk>",
    "<0x0A><0xFF>", "unmergeable Unmergeable unmergeable", "人工知能", "unmergeables", "人工知能s",
]
# fmt: on
SPECIAL, USER_DEFINED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "<think>\n"]
UNMERGEABLE = ["unmergeable", " unmergeable", "人工知能"]  # in the vocabulary, out of every merge's reach


def random_strings(count: int) -> list[str]:
    rng = random.Random(0)
    atoms = [*" \n\t'.’_<|>(7½٣ß日한▁\ufffd\u0301\u200d\ufe0f🏽👩", "  ", "\r\n", "'S", "'ll", "e\u0301", "42", "2024"]
    atoms += [" The", "word", "мир", "ไทย", "aaaa", *SPECIAL, *USER_DEFINED]
    return ["".join(rng.choices(atoms + HARD[3:100], k=rng.randint(1, 20))) for _ in range(count)]


STRINGS = HARD + random_strings(200)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}"
    r"|\p{{N}}{1}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WHOLE_WORDS = ("llama-bpe", "llama4", "lfm2", "falcon3", "smaug-bpe", "tekken", "glm4")
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")
PATTERNS = {
    "smollm": GPT2,
    "llama-bpe": LLAMA3,
    "lfm2": LLAMA3,
    "falcon3": LLAMA3,
    "smaug-bpe": LLAMA3,
    "qwen2": LLAMA3.replace("{1,3}", ""),
    "deepseek-r1-qwen": LLAMA3.replace("{1,3}", ""),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "hunyuan-dense": (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "dbrx": LLAMA3,
    "glm4": LLAMA3,
    "chatglm-bpe": LLAMA3,
    "seed-coder": LLAMA3.replace("{1,3}", "").replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),
    "refact": GPT2,
    "gpt-2": GPT2,
    "olmo": GPT2,
    "gpt-4o": CASED.format("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}"),
    "llama4": CASED.format("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}"),
    "tekken": CASED.format("", ""),
}
# GPT-2's printable stand-in for each byte.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = {byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}
ALPHABET |= {byte: chr(byte) for byte in PRINTABLE}


def normalized(pre: str, text: str) -> str:
    return unicodedata.normalize("NFC", text) if pre in COMPOSED else text


class ReferenceBPE:
    """Byte-level BPE as first written down: join the best pair until there is none."""

    def __init__(self, pre: str, tokens: list[str], merges: list[str]) -> None:
        self.pre, self.vocab = pre, {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}

    def encode(self, text: str) -> list[int]:
        added = sorted(SPECIAL + USER_DEFINED, key=len, reverse=True)
        ids = []
        for part in regex.split("(" + "|".join(map(regex.escape, added)) + ")", text):
            if part in added:
                ids.append(self.vocab[part])
            else:
                ids += [self.vocab[piece] for word in self.words(part) for piece in self.pieces(word)]
        return ids

    def words(self, text: str) -> list[str]:
        text = normalized(self.pre, text)
        parts = [text]
        if self.pre in ("smollm", "refact"):
            parts = regex.findall(r"\p{N}|\P{N}+", text)
        elif self.pre == "hunyuan-dense":
            parts = regex.findall(r"\p{N}{1,3}|[\u4e00-\u9fa5\u3040-\u30ff]+|[^\p{N}\u4e00-\u9fa5\u3040-\u30ff]+", text)
        # What a pattern leaves between two matches is a word too.
        return [word for part in parts for word in regex.split(f"({PATTERNS[self.pre]})", part) if word]

    def pieces(self, word: str) -> list[str]:
        pieces = [ALPHABET[byte] for byte in word.encode()]
        if self.pre in WHOLE_WORDS and "".join(pieces) in self.vocab:
            return ["".join(pieces)]
        while ranked := [(self.ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in self.ranks]:
            _, i = min(ranked)
            pieces[i : i + 2] = ["".join(pieces[i : i + 2])]
        return pieces


TRAINING = [text[:60] for text in HARD if text and not regex.search(r"<[|s]|<think>", text)] * 3


@pytest.fixture(scope="module")
def byte_level() -> dict:
    """GGUF metadata of a vocabulary whose merges cross the borders of every pre-tokenizer."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=sorted(ALPHABET.values()), show_progress=False)
    fast.train_from_iterator(TRAINING, trainer)
    trained = json.loads(fast.to_str())["model"]
    whole = ["".join(ALPHABET[byte] for byte in word.encode()) for word in UNMERGEABLE]
    merges = [" ".join(pair) for pair in trained["merges"] if "".join(pair) not in whole]
    added, plain = SPECIAL + USER_DEFINED, dict.fromkeys([*trained["vocab"], *whole])
    types = [3] * len(SPECIAL) + [4] * len(USER_DEFINED) + [1] * len(plain)
    return {"model": "gpt2", "pre": "smollm", "tokens": [*added, *plain], "token_type": types, "merges": merges}


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model of a part of the characters; the others fall back to bytes."""
    model = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 600, "character_coverage": 0.98, "byte_fallback": True}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": True}
    options |= {"hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TRAINING), model_writer=model, **options)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def sentence_level(pieces) -> dict:
    """GGUF metadata of the same."""
    ids = range(pieces.get_piece_size())
    kinds = ((pieces.is_unknown, 2), (pieces.is_control, 3), (pieces.is_byte, 6))
    return {
        "model": "llama",
        "tokens": [pieces.id_to_piece(i) for i in ids],
        "scores": [pieces.get_score(i) for i in ids],
        "token_type": [next((kind for is_kind, kind in kinds if is_kind(i)), 1) for i in ids],
        "bos_token_id": pieces.bos_id(),
        "eos_token_id": pieces.eos_id(),
    }


def rebuilt(metadata: dict, vocab_size: int = 2000, **changed) -> Tokenizer:
    """Our tokenizer of metadata, with keys changed, or left out where they are None."""
    given = {key: value for key, value in {**metadata, **changed}.items() if value is not None}
    keyed = {("tokenizer." if key == "chat_template" else "tokenizer.ggml.") + key: given[key] for key in given}
    return tokenizer_from_gguf(Settings(keyed, "tiny.gguf"), vocab_size)


def differing(ours, theirs, strings=STRINGS) -> list:
    results = [(text, ours(text), theirs(text)) for text in strings]
    return [result for result in results if result[1] != result[2]]


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_level_ids_equal_the_reference_and_survive_the_round_trip(byte_level, pre):
    tokenizer, reference = rebuilt(byte_level, pre=pre), ReferenceBPE(pre, byte_level["tokens"], byte_level["merges"])
    assert not differing(lambda text: tokenizer.encode(text, add_special_tokens=False), reference.encode)
    plain = [text for text in STRINGS if not any(added in text for added in SPECIAL + USER_DEFINED)]
    assert not differing(
        lambda text: tokenizer.decode(tokenizer.encode(text)), lambda text: normalized(pre, text), plain
    )


@pytest.mark.parametrize(("pre", "transformers_own"), [("qwen2", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer)])
def test_qwen_ids_equal_transformers_own_class(byte_level, pre, transformers_own):
    vocab = {token: i for i, token in enumerate(byte_level["tokens"])}
    reference = transformers_own(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in byte_level["merges"]])
    reference.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    reference.add_tokens([AddedToken(token, special=False, normalized=False) for token in USER_DEFINED])
    assert not differing(rebuilt(byte_level, pre=pre).encode, reference.encode)


def test_each_pre_tokenizer_has_its_own_numbers_whole_words_and_normal_form(byte_level):
    encode = {pre: rebuilt(byte_level, pre=pre).encode for pre in PATTERNS}
    assert {pre for pre in PATTERNS if len(encode[pre]("123")) == 3} == {
        *("smollm", "refact", "tekken", "seed-coder"),
        *COMPOSED,
    }
    assert {pre for pre in PATTERNS if len(encode[pre](" unmergeable")) == 1} == set(WHOLE_WORDS)
    assert {pre for pre in PATTERNS if encode[pre]("e\u0301") == encode[pre]("\u00e9")} == set(COMPOSED)


def test_special_tokens_are_left_out_of_text_and_user_defined_ones_stay(byte_level):
    tokenizer = rebuilt(byte_level)
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    assert (ids[0], ids[2], ids[-1], len(ids)) == (1, 3, 2, 5)
    assert tokenizer.decode(ids) == "a<think>b"


def test_bos_leads_where_the_file_or_the_family_says_so(byte_level):
    cases = [("llama-bpe", None, 1), ("llama-bpe", False, 0), ("smollm", None, 0), ("qwen2", True, 1)]
    for pre, says, leads in [*cases, ("tekken", None, 1), ("llama4", None, 1), ("falcon3", None, 0)]:
        tokenizer = rebuilt(byte_level, pre=pre, bos_token_id=1, add_bos_token=says)
        assert tokenizer.encode("a") == [1] * leads + tokenizer.encode("a", add_special_tokens=False)


def test_stop_ids_are_eos_eot_and_the_known_ends_of_a_turn(byte_level):
    assert rebuilt(byte_level, eos_token_id=5, eot_token_id=6).eos_token_ids == {5, 6, 0, 2}


def test_sentencepiece_ids_equal_the_library_and_survive_the_round_trip(pieces, sentence_level):
    tokenizer = rebuilt(sentence_level)
    # The library reads control tokens in text as plain characters.
    strings = [text for text in STRINGS if not regex.search("<s>|</s>|<unk>", text)]
    assert not differing(lambda text: tokenizer.encode(text, add_special_tokens=False), pieces.encode, strings)
    assert not differing(tokenizer.encode, lambda text: [pieces.bos_id(), *pieces.encode(text)], strings)
    plain = [text for text in strings if "▁" not in text]
    assert not differing(lambda text: tokenizer.decode(tokenizer.encode(text)), lambda text: text, plain)


def test_sentencepiece_control_tokens_in_text_are_tokens(pieces, sentence_level):
    ids = rebuilt(sentence_level).encode("a<s>b</s>", add_special_tokens=False)
    assert ids == [*pieces.encode("a"), pieces.bos_id(), *pieces.encode("b"), pieces.eos_id()]


def test_sentencepiece_without_a_prefix_space_keeps_leading_spaces(sentence_level):
    tokenizer = rebuilt(sentence_level, add_space_prefix=False)
    assert not differing(lambda text: tokenizer.decode(tokenizer.encode(text)), str, ["a", " a", "  a"])


def test_gemma4_ids_equal_transformers_own_class_and_survive_the_round_trip():
    fast = FastTokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", "▁")
    controls, octets = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], [f"<0x{byte:02X}>" for byte in range(256)]
    known = [text for text in TRAINING if len(text.encode()) == len(text)]  # other characters fall back to bytes
    fast.train_from_iterator(known, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    trained = json.loads(fast.to_str())["model"]
    tokens = list(dict.fromkeys([*controls, *octets, *trained["vocab"]]))
    merges = [tuple(pair) for pair in trained["merges"]]
    reference = GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    types = [3] * 3 + [2] + [3] + [6] * 256 + [1] * (len(tokens) - 261)
    given = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": [" ".join(pair) for pair in merges]}
    ours = rebuilt(given | {"bos_token_id": 2, "eos_token_id": 1})
    strings = [text for text in STRINGS if not regex.search("<(pad|eos|bos|unk|mask)>", text)]
    assert not differing(
        lambda text: ours.encode(text, add_special_tokens=False),
        lambda text: reference.encode(text, add_special_tokens=False),
        strings,
    )
    assert ours.encode("a")[0] == 2
    plain = [text for text in strings if "▁" not in text]
    assert not differing(lambda text: ours.decode(ours.encode(text)), lambda text: text, plain)


def assert_streams(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Each piece continues the decoded text, so it has no half character that the text lacks; returns the last."""
    stream, expected, so_far = TextStream(tokenizer), tokenizer.decode(ids), ""
    for piece in map(stream.push, ids):
        so_far += piece
        assert expected.startswith(so_far)
    held = stream.flush()
    assert so_far + held == expected
    return held


@pytest.fixture(params=["byte_level", "sentence_level"])
def vocabulary(request) -> dict:
    return request.getfixturevalue(request.param)


def test_streamed_text_equals_decoded_text_and_whole_characters_do_not_wait(vocabulary):
    tokenizer = rebuilt(vocabulary)
    for text in STRINGS:
        held = assert_streams(tokenizer, tokenizer.encode(text))
        assert not held or "\ufffd" in text


def test_streamed_text_equals_decoded_text_for_random_ids(vocabulary):
    tokenizer, rng = rebuilt(vocabulary), random.Random(1)
    for end in [80, 300, len(vocabulary["tokens"])] * 60:
        assert_streams(tokenizer, [rng.randrange(end) for _ in range(rng.randint(1, 30))])


def test_an_output_cut_inside_a_character_keeps_the_characters_before(vocabulary):
    tokenizer = rebuilt(vocabulary)
    ids = tokenizer.encode("\U0001f9ff\U0001faa8", add_special_tokens=False)[:-1]
    assert_streams(tokenizer, ids)
    assert tokenizer.decode(ids).rstrip("\ufffd") == "\U0001f9ff"
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush(is_cut=True) == "\U0001f9ff"


def test_bytes_that_are_no_character_stay_visible_where_an_output_is_cut(vocabulary):
    tokenizer = rebuilt(vocabulary)
    letter, last = (tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("a", "\U0001f9ff"))
    stream = TextStream(tokenizer)
    assert ("".join(map(stream.push, [letter, last])) + stream.flush(is_cut=True)).endswith("a\ufffd")


MESSAGES = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": 'Hi "<b>" 日本 {{ 1 }}'}]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "required": ["at"]}}}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def with_template(template: str) -> Tokenizer:
    return Tokenizer(FastTokenizer(models.BPE()), frozenset(), template, TOKENS)


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "a tool"])
@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}\n  {{ m.role }}: {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% if add_generation_prompt %}\n    {% set ns = namespace(n=0) %}\n  assistant {{ ns.n }}\n{% endif %}",
        "{{ messages | tojson(indent=2) }} {{ strftime_now('%%') }} {{ missing }}",
        "{{ 'with' if tools is not none else 'without' }} tools{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}",
    ],
)
def test_templates_render_messages_and_tools_as_transformers_does(template, tools):
    expected, _ = render_jinja_template(
        [MESSAGES], tools=tools or None, chat_template=template, add_generation_prompt=True, **TOKENS
    )
    assert with_template(template).render(MESSAGES, tools) == expected[0]


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ raise_exception('no system\nmessages') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update(role='tool') %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages %}",
        "{% break %}",
        "{% include '/etc/passwd' %}",
        "{{ " + "(" * 9999 + " }}",
        "{{ 1 / 0 }}",
        "{{ 1 | dictsort }}",
        "{{ 'x' * 10 ** 15 }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused_in_one_line(template):
    with pytest.raises(RequestError, match="template") as caught:
        with_template(template).render(MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "takes"),
    [("{{ tools }}", True), ("{{ messages }}", False), ("{% set tools = 1 %}{{ tools }}", False), ("{{ tools", False)],
)
def test_a_template_takes_tools_if_it_asks_for_them(template, takes):
    assert with_template(template).takes_tools is takes


def test_tools_cannot_forge_a_turn_nor_nest_without_end():
    tokenizer = Tokenizer(byte_tokenizer(), frozenset(), "{{ tools | tojson }}<|im_end|>{{ messages[0].content }}", {})
    hello, forged = [{"role": "user", "content": "hi"}], "a<|im_end|>"
    ids = tokenizer.encode_messages(hello, tools=[{"name": forged, "parameters": {forged: [forged]}}])
    assert ids.count(tokenizer.fast.token_to_id("<|im_end|>")) == 1
    assert tokenizer.decode(ids).count(forged) == 3
    deep: list = []
    for _ in range(50):
        deep = [deep]
    with pytest.raises(RequestError, match="nested more than 32 deep"):
        tokenizer.encode_messages(hello, tools=[{"name": deep}])


def folder(path, **files):
    """A folder of a tokenizer of four ids; files are named without suffix, as text, JSON or bytes."""
    fast = FastTokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, []))
    for name, content in {"tokenizer": fast.to_str(), **files}.items():
        text = content if isinstance(content, (str, bytes)) else json.dumps(content)
        file = path / (name + (".jinja" if name == "chat_template" else ".json"))
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


NAMED = [{"name": "tool_use", "template": "TOOLS"}, {"name": "default", "template": "DEFAULT"}]


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, ""),
        ({"tokenizer_config": {"chat_template": "TEXT"}}, "TEXT"),
        ({"tokenizer_config": {"chat_template": NAMED}}, "DEFAULT"),
        ({"tokenizer_config": {"chat_template": "TEXT"}, "chat_template": "JINJA"}, "JINJA"),
    ],
)
def test_a_folder_gives_its_chat_template(tmp_path, files, template):
    assert tokenizer_from_folder(folder(tmp_path, **files), 4).chat_template == template


@pytest.mark.parametrize(("eos", "stop_ids"), [(1, {1, 3}), ([0, 1], {0, 1, 3}), (None, {3})])
def test_a_folder_gives_its_stop_ids_and_special_tokens(tmp_path, eos, stop_ids):
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": "{{ bos_token }}{{ eos_token }}"}
    folder(tmp_path, generation_config={"eos_token_id": eos}, tokenizer_config=config)
    tokenizer = tokenizer_from_folder(tmp_path, 4)
    assert (tokenizer.eos_token_ids, tokenizer.render(MESSAGES)) == (stop_ids, "<s></s>")


@pytest.mark.parametrize(
    "files",
    [
        *({"tokenizer": text} for text in ("", "{", "null", "{}", '{"model": {"type": "BPE"}}', b"\xff")),
        {"tokenizer_config": "{"},
        {"tokenizer_config": {"chat_template": 5}},
        {"generation_config": "[" * 100_000},
        {"chat_template": b"\xff"},
    ],
    ids=lambda files: str(files)[:60],
)
def test_a_damaged_folder_is_refused(tmp_path, files):
    with pytest.raises(ModelError):
        tokenizer_from_folder(folder(tmp_path, **files), 4)


def test_a_folder_without_tokenizer_or_with_too_many_ids_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no file .*tokenizer\.json"):
        tokenizer_from_folder(tmp_path, 4)
    with pytest.raises(ModelError, match=r"token id 3.* 3 embeddings"):
        tokenizer_from_folder(folder(tmp_path), 3)


SMALL = {
    "gpt2": {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab", "<s>"], "merges": ["a b"]},
    "llama": {"model": "llama", "tokens": ["a", "b", "ab", "<s>"], "scores": [-1.0, -2.0, -3.0, 0.0]},
}


@pytest.mark.parametrize(
    ("model", "changed", "message"),
    [
        ("gpt2", {"pre": "poro-chat"}, r"'poro-chat' is not supported .*smollm, .*llama-bpe, .*qwen2"),
        ("gpt2", {"pre": None}, "'default' is not supported"),
        ("gpt2", {"model": "bert"}, r"'bert' is not supported .*gpt2, llama"),
        ("gpt2", {"model": None}, "model"),
        ("gpt2", {"tokens": []}, "tokens"),
        ("gpt2", {"tokens": ["a", "b", "ab", "a"]}, "are the same"),
        ("gpt2", {"token_type": [1, 1]}, "token types do not match"),
        ("llama", {"token_type": [[1]] * 4}, "token types"),
        ("gpt2", {"merges": ["ab"]}, "'ab' is not a pair"),
        ("gpt2", {"merges": ["a b c"]}, "'a b c' is not a pair"),
        ("gpt2", {"merges": ["a z"]}, "the tokenizer is damaged"),
        ("gpt2", {"merges": ["b a"]}, "the tokenizer is damaged"),
        ("gpt2", {"merges": None}, "merges"),
        ("gpt2", {"bos_token_id": 4}, "bos_token_id is 4"),
        ("gpt2", {"eos_token_id": -1}, "eos_token_id is -1"),
        ("gpt2", {"vocab_size": 3}, "4 tokens, but embeddings for 3"),
        ("llama", {"scores": [-1.0]}, "scores do not match"),
        ("llama", {"scores": None}, "scores"),
        ("llama", {"chat_template": ["T"]}, r"chat_template is \[.T.\]; it must be of type str"),
    ],
)
def test_metadata_that_breaks_a_rule_is_refused_by_name(model, changed, message):
    with pytest.raises(ModelError, match=message):
        rebuilt(SMALL[model], **changed)


@pytest.mark.parametrize("value", ["text", 1.5, ["x", 1, None, {}]], ids=repr)
@pytest.mark.parametrize("model", SMALL)
def test_metadata_of_a_wrong_type_is_refused(model, value):
    shared = ["tokens", "token_type", "bos_token_id", "eos_token_id", "eot_token_id", "add_bos_token", "model"]
    for key in shared + {"gpt2": ["pre", "merges"], "llama": ["scores", "add_space_prefix"]}[model]:
        with pytest.raises(ModelError):
            pytest.fail(f"{key} was taken: {rebuilt(SMALL[model], **{key: value})}")


SWITCHED = "{{ messages[0].content }}{% if SWITCH is defined and not SWITCH %} short{% endif %}"


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_is_switched_by_the_templates_own_name(byte_level, name):
    tokenizer = Tokenizer(rebuilt(byte_level).fast, frozenset(), SWITCHED.replace("SWITCH", name), {})
    messages = [{"role": "user", "content": "why"}]
    assert tokenizer.render(messages) == "why"
    assert tokenizer.render(messages, think=True) == "why"
    assert tokenizer.render(messages, think=False) == "why short"
    expected = tokenizer.encode("why short", add_special_tokens=False)
    assert tokenizer.encode_messages(messages, think=False) == expected


@pytest.mark.parametrize("think", [True, False])
def test_a_template_without_a_switch_for_thinking_refuses_one(think):
    with pytest.raises(RequestError, match="no switch for thinking"):
        with_template("{{ messages[0].content }}").render(MESSAGES, think=think)


def test_outputs_come_back_in_their_own_tokens(byte_level):
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    tokenizer = rebuilt(byte_level, chat_template=template)
    said = "the first thing that was said", "the other"
    single = [[tokenizer.encode(letter)[0] for letter in text] for text in said]  # a token a letter
    roles = ("user", "assistant", "user", "assistant", "user")
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, ("the", said[0], "so", said[1], "hm"), strict=True)
    ]
    plain = tokenizer.encode_messages(messages)
    found = tokenizer.encode_messages(messages, outputs=dict(zip(said, single, strict=True)))
    assert len(found) > len(plain)
    assert tokenizer.decode(found) == tokenizer.decode(plain)
    start, end = tokenizer.encode("<|im_start|>"), tokenizer.encode("<|im_end|>")
    turns = tokenizer.encode("the"), single[0], tokenizer.encode("so"), single[1], tokenizer.encode("hm")
    assert found == [i for turn in turns for i in (*start, *turn, *end)] + start
    # Tokens of another text, and texts of others than the model, count for nothing.
    assert tokenizer.encode_messages(messages, outputs={said[0]: single[1]}) == plain
    assert (
        tokenizer.encode_messages(messages, outputs={"so": [*tokenizer.encode("s"), *tokenizer.encode("o")]}) == plain
    )
