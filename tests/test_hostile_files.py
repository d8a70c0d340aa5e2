"""Files made to do harm are loaded, or rejected with one line, at a bounded cost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from test_bad_input import _own_environment, finish, patched, refused, start, u32, u64  # noqa: F401  (a fixture)

from taper.errors import ModelError, RequestError
from taper.models import load_model
from taper.models.files import Settings
from taper.models.tokenizer import Tokenizer, loading_tokenizer
from taper.models.tokenizer_files import tokenizer_from_gguf

UNKNOWN = {"type": "WordLevel", "vocab": {"hi": 0}, "unk_token": "[UNK]"}
WORDPIECE = {"type": "WordPiece", "continuing_subword_prefix": "", "max_input_chars_per_word": 9}
MERGE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
TEXT, OTHER_TEXT = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(regex: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def template(*pieces: dict, **ids: list[int]) -> dict:
    tokens = {name: {"id": name, "ids": each, "tokens": [name] * len(each)} for name, each in ids.items()}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": tokens}


def special(name: str) -> dict:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def rewrite_json(path, changes: dict) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": UNKNOWN}, "UNK"),
        ({"model": UNKNOWN | WORDPIECE}, "UNK"),
        ({"model": {"type": "BPE", "vocab": {"hi": 0}, "merges": [], "unk_token": "?"}}, "Unk token"),
        ({"model": {"type": "Unigram", "vocab": [["hi", -1.0]], "unk_id": None}}, "unk_id"),
        ({"model": MERGE | {"continuing_subword_prefix": "#######"}}, "range end index"),  # from here on, panics
        ({"post_processor": template(special("missing"), TEXT)}, "no entry found"),
        ({"post_processor": template(OTHER_TEXT)}, "index out of bounds"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "charsmap"),
        ({"pre_tokenizer": split("(a+)+b")}, "Regex search error"),
        ({"post_processor": template(special("X"), TEXT, X=[99_999])}, "token id 99999"),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace({"String": "a"}, "aa")] * 40}}, "could grow"),
        ({"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "a" * 9)] * 20}}, "could grow"),
        ({"post_processor": {"type": "Sequence", "processors": [template(TEXT, TEXT)] * 40}}, "could grow"),
        ({"post_processor": template(special("X"), TEXT, X=[1] * 5000)}, "could grow"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_tokenizer_that_loads_but_does_not_work_is_refused(folder, changes, says):
    rewrite_json(folder / "tokenizer.json", changes)
    line = refused("generate", "--model", folder, "hi")
    assert "tokenizer.json" in line
    assert says in line


@pytest.mark.parametrize("pattern", [{"String": ""}, {"Regex": ""}, {"Regex": "x*"}])
def test_tokenizer_with_an_empty_pattern_is_refused_or_works(folder, pattern):
    rewrite_json(folder / "tokenizer.json", {"normalizer": replace(pattern, "-")})
    try:
        tokenizer = load_model(folder).tokenizer
    except ModelError:
        return
    assert isinstance(tokenizer.decode(tokenizer.encode("hi")), str)


def test_text_on_which_the_tokenizer_panics_is_refused(folder):
    """The library's own lines on a panic come first: only while a tokenizer loads are they held back."""
    slow = {"type": "Split", "pattern": {"Regex": "(z+)+y"}, "behavior": "Isolated", "invert": False}
    rewrite_json(
        folder / "tokenizer.json", {"pre_tokenizer": slow, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    )
    process = start("generate", "--model", folder, "z" * 50)
    out, err = finish(process)
    assert (process.returncode, out) == (2, b"")
    assert b"Traceback" not in err
    assert err.decode().splitlines()[-1].startswith("taper: the model's tokenizer cannot encode this text")


class Failing:
    """A library's tokenizer that raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def encode(self, *_, **__):
        raise self.error

    decode = encode


@pytest.mark.parametrize(
    ("raised", "encoding", "decoding"),
    [
        (Exception("odd"), RequestError, ModelError),
        (BaseException("a panic"), RequestError, ModelError),
        (KeyboardInterrupt(), KeyboardInterrupt, KeyboardInterrupt),
        (SystemExit(), SystemExit, SystemExit),
    ],
    ids=repr,
)
def test_whatever_the_library_raises_is_an_error_and_interrupts_pass(raised, encoding, decoding):
    tokenizer = Tokenizer(Failing(raised), frozenset(), "", {})
    with pytest.raises(encoding):
        tokenizer.encode("hi")
    with pytest.raises(decoding):
        tokenizer.decode([1])


def test_standard_error_of_others_is_not_lost_while_a_tokenizer_loads(capfd):
    with loading_tokenizer("file"):
        os.write(2, b"another thread's line\n")
    assert capfd.readouterr().err == "another thread's line\n"
    with suppress(ModelError), loading_tokenizer("file"):
        os.write(2, b"one more\n")
        raise ValueError("no panic")
    assert capfd.readouterr().err == "one more\n"


def text(content: str) -> bytes:
    return u64(len(content)) + content.encode()


UINT64, STRING, ARRAY = 10, 8, 9  # types of GGUF metadata


def write_header(path, entries: list[bytes], size: int, tensors: int = 0) -> None:
    """A GGUF file of a header and then zeros, which take no space on disk."""
    path.write_bytes(b"GGUF" + u32(3) + u64(tensors) + u64(len(entries)) + b"".join(entries))
    os.truncate(path, size)


def array(key: str, kind: int, count: int) -> bytes:
    return text(key) + u32(ARRAY, kind) + u64(count)


@pytest.mark.parametrize(
    ("entries", "tensors", "says"),
    [
        ([array("numbers", UINT64, 1 << 25)], 0, "do not fit into the 67108864 bytes"),
        ([array("numbers", UINT64, (1 << 21) + 1)], 0, "more than 2097152 metadata items"),
        ([array("texts", STRING, (1 << 21) + 1)], 0, "more than 2097152 metadata items"),
        ([text("text") + u32(STRING) + u64(1 << 27)], 0, "do not fit into the 67108864 bytes"),
        ([], (1 << 16) + 1, "at most 65536"),
    ],
    ids=["269 MB of numbers", "two million numbers", "two million texts", "a long text", "tensors"],
)
def test_gguf_header_of_any_size_is_refused_cheaply(tmp_path, entries, tensors, says):
    write_header(tmp_path / "large.gguf", entries, 300 << 20, tensors)
    assert says in refused("generate", "--model", tmp_path / "large.gguf", "hi", memory=1 << 30)


def test_gguf_with_a_terabyte_behind_its_tensors_is_not_read_whole(tiny_gguf, tmp_path):
    path = shutil.copy(tiny_gguf, tmp_path / "long.gguf")
    os.truncate(path, 1 << 40)
    started = time.monotonic()
    assert load_model(path).config.num_hidden_layers == 6
    assert time.monotonic() - started < 10


def test_gguf_tensors_that_lie_in_each_other_are_refused(tiny_gguf, tmp_path):
    path = tmp_path / "overlap.gguf"
    path.write_bytes(patched(tiny_gguf.read_bytes(), "blk.1.attn_norm.weight", 4 + 8 + 4, u64(0)))
    assert "inside another one" in refused("generate", "--model", path, "hi")


def pieces(*groups: list[str]) -> dict:
    """GGUF metadata of a SentencePiece vocabulary."""
    tokens = [piece for group in groups for piece in group]
    scores = [-float(index) for index in range(len(tokens))]
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": [1] * len(tokens)}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (["a" * 400_000], "a token of 400000 characters; at most 256"),
        ([f"{index:0200}" for index in range(30_000)], "6000000 characters in all; at most 4194304"),
        (["a" * a + "b" * (size - a) for size in range(1, 150) for a in range(size + 1)], "more than 1048576 ways"),
    ],
    ids=["one long piece", "many long pieces", "many merges"],
)
def test_sentencepiece_vocabulary_that_would_take_minutes_is_refused(tokens, says):
    started = time.process_time()
    with pytest.raises(ModelError, match=says):
        tokenizer_from_gguf(Settings(pieces(tokens), "tiny.gguf"), len(tokens))
    assert time.process_time() - started < 10


ODD = ["FIFO", "folder", "device", "link to itself", "no permission"]


def make_odd(path: Path, kind: str) -> None:
    """Put something that is not an ordinary readable file in a file's place."""
    if sys.platform == "win32" and kind != "folder":
        pytest.skip("it has no such files")
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    else:
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        path.touch(mode=0)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
        *("model.safetensors", "model.safetensors.index.json"),
    ],
)
def test_what_is_not_an_ordinary_file_is_refused_in_a_folder(folder, name, kind):
    make_odd(folder / name, kind)
    if name.endswith(".index.json"):  # read where the weights are in several files
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(ModelError, match=re.escape(name)):
        load_model(folder)


@pytest.mark.parametrize("kind", sorted(set(ODD) - {"folder"}))
def test_what_is_not_an_ordinary_file_is_refused_as_a_model(tmp_path, kind):
    make_odd(tmp_path / "odd.gguf", kind)
    assert "odd.gguf" in refused("generate", "--model", tmp_path / "odd.gguf", "hi")


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_an_ordinary_file_is_refused_as_a_policy(tiny_gguf, tmp_path, kind):
    make_odd(tmp_path / "odd.json", kind)
    assert "odd.json" in refused("generate", "--model", tiny_gguf, "--policy", tmp_path / "odd.json", "hi")


def safetensors(path: Path, tensors: dict | bytes, data: bytes) -> None:
    header = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    path.write_bytes(u64(len(header)) + header + data)


def norm(dtype: str = "F32", shape: tuple = (64,), size: int = 256, name: str = "model.norm.weight") -> dict:
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}


ONE_TENSOR = json.dumps(norm())[1:-1].encode()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (norm(), "model.norm.weight is in"),
        ({"norm": norm()["model.norm.weight"]}, "the name that Taper gives to another"),
        (b"{" + ONE_TENSOR + b"," + ONE_TENSOR + b"}", "duplicate key"),
        (norm("I64", (32,), name="odd"), "type I64"),
        (norm("F8_E4M3", (256,), name="odd"), "type F8_E4M3"),
        (norm(shape=(1 << 40, 1 << 40)), "cannot read"),
        (norm(size=128), "cannot read"),
        (b"[" * 1000, "cannot read"),
        (b" " * ((16 << 20) + 1), "at most 16777216"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_shard_that_repeats_a_tensor_or_has_an_odd_one_is_refused(folder, tensors, says):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    safetensors(folder / "model-00002-of-00002.safetensors", tensors, bytes(256))
    with pytest.raises(ModelError, match=says):
        load_model(folder)


@pytest.mark.parametrize("lost", ["no folder for temporary files", "standard error is closed"])
def test_tokenizer_loads_without_what_hides_panics(folder, lost):
    code = f"""
import os, tempfile
from pathlib import Path
from taper.models import load_model
if {lost!r}.startswith("no"):
    tempfile.TemporaryFile = lambda: open("/nowhere/file")
else:
    os.close(2)
print(load_model(Path({str(folder)!r})).tokenizer.encode("hi"))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert process.stdout.startswith("["), process.stderr
