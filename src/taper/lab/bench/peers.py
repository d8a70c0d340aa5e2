"""Other programs that run the same model, each behind one function: what a user would use without Taper."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ...errors import RequestError
from ...models.families import MODEL_TYPES
from .measure import Clock, OutOfTimeError, Speeds
from .target import BenchOptions, Target

_PROGRAM = "llama-bench"
_ALL_LAYERS = 999  # more than any model has

Peer = Callable[[int, Clock], Speeds]  # measures a prompt and an output of one length within a time budget


def llama_cpp(target: Target, options: BenchOptions) -> Peer:
    """llama.cpp's llama-bench on the same file.

    Raises:
        RequestError: it is not installed, or the model is not a GGUF file.
    """
    folder = find_llama_bench(options.llama_bin)
    if folder is None:
        raise RequestError("it is not on PATH", "name its folder with --llama-bin")
    path = target.path
    if target.weights is not None and not target.on_torch:
        path = _random_file(target)
    if path is None or path.is_dir():
        raise RequestError("it runs GGUF files only")
    layers = 0 if target.device == "cpu" else options.gpu_layers or _ALL_LAYERS
    bench = LlamaBench(folder, path, target.threads, layers)

    def run(length: int, clock: Clock) -> Speeds:
        try:
            prompt = bench.measure(prompt_tokens=length, timeout_s=clock.left_s())
            output = bench.measure(max_tokens=length, timeout_s=clock.left_s())
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        return Speeds(length / prompt, 1 / output)

    return run


def _random_file(target: Target) -> Path:
    """The random weights of a CPU in a GGUF file without a vocabulary, which is removed when this process ends."""
    if find_spec("gguf") is None:
        raise RequestError("writing a GGUF file needs the gguf package", 'pip install "taper-llm[torch]"')
    from gguf import GGMLQuantizationType, GGUFWriter

    folder, config = Path(tempfile.mkdtemp(prefix="taper-")), target.config
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "random.gguf"
    writer = GGUFWriter(path, config.architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = MODEL_TYPES[config.architecture].gguf_names
    for name, tensor in (target.weights or {}).items():
        rows = tensor.data.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(names.theirs(name), rows, raw_dtype=GGMLQuantizationType[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def transformers(target: Target, options: BenchOptions) -> Peer:
    """transformers' `generate` with a static cache, which it compiles on a GPU; it shares Taper's random weights.

    Raises:
        RequestError: it is not installed, or there are no such weights.
    """
    if find_spec("transformers") is None:
        raise RequestError("it is not installed")
    if target.weights is None or not target.on_torch:
        raise RequestError("it is compared on random weights on a GPU, which it shares with Taper")
    import torch

    from .torch_device import synchronize, transformers_model

    model = transformers_model(target.config, target.weights)

    def seconds(prompt_tokens: int, max_tokens: int, clock: Clock) -> float:
        ids = torch.randint(target.config.vocab_size, (1, prompt_tokens), device=target.device)
        rest = {"max_new_tokens": max_tokens, "do_sample": False, "cache_implementation": "static"}
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_time=clock.left_s(), **rest)
        synchronize(target.device)
        if out.shape[1] < prompt_tokens + max_tokens:
            raise OutOfTimeError
        return time.perf_counter() - started

    def run(length: int, clock: Clock) -> Speeds:
        ttft = seconds(length, 1, clock)
        first = seconds(1, 1, clock)
        return Speeds(ttft, (seconds(1, length, clock) - first) / (length - 1))

    return run


PEERS: dict[str, Callable[[Target, BenchOptions], Peer]] = {"llama.cpp": llama_cpp, "transformers": transformers}


@dataclass(frozen=True)
class LlamaBench:
    """llama-bench on one model."""

    folder: Path  # of llama.cpp's programs
    model: Path  # a GGUF file
    threads: int
    gpu_layers: int = 0  # how many layers run there

    def measure(
        self, *, prompt_tokens: int = 0, max_tokens: int = 0, context: int = 0, timeout_s: float | None = None
    ) -> float:
        """Tokens per second of a prompt (`-p`) or, if that is 0, of decoding (`-n`): one repetition after a warm-up.

        Tokens of `context` come before (`-d`) and are not timed. Errors are those of `run`.
        """
        assert (prompt_tokens == 0) != (max_tokens == 0), "measure a prompt or decoding"
        arguments: list[str | int] = ["-p", prompt_tokens, "-n", max_tokens, "-fa", 1, "-r", 1, "-o", "json"]
        arguments += ["-d", context] if context else []
        (test,) = json.loads(self.run(_PROGRAM, arguments, timeout_s))
        return float(test["avg_ts"])

    def run(self, program: str, arguments: Sequence[str | int], timeout_s: float | None = None) -> str:
        """What one of the programs prints on standard output.

        Raises:
            RequestError: the program cannot be run or failed.
            subprocess.TimeoutExpired: it took longer than `timeout_s` seconds.
        """
        command = [self.folder / program, "-m", self.model, "-t", self.threads, "-ngl", self.gpu_layers, *arguments]
        words = [str(word) for word in command]
        try:
            done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=timeout_s, check=True)
        except OSError as error:
            raise RequestError(f"cannot run {words[0]}: {error.strerror}", "build llama.cpp anew") from None
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.strip()] or ["it printed nothing"]
            raise RequestError(f"{program} failed: {lines[-1]}", "try a newer llama.cpp") from None
        return done.stdout


def find_llama_bench(given: Path | None = None) -> Path | None:
    """The folder of llama-bench: the given one, or that of the program on PATH; None if it is not installed.

    Raises:
        RequestError: the given folder does not have it.
    """
    if given is None:
        program = shutil.which(_PROGRAM)
        return Path(program).resolve().parent if program else None
    if shutil.which(_PROGRAM, path=given) is None:
        raise RequestError(f"no program {_PROGRAM} in {given}", "name the folder with llama.cpp's programs")
    return given
