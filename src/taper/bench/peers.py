"""Other programs that run the same model, each behind one function: what a user would have without Taper."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ..engine import Engine
from ..errors import RequestError
from ..models.config import ModelConfig
from ..models.families import MODEL_TYPES
from ..policy import DepthPolicy
from .measure import Clock, OutOfTimeError, measure
from .options import Options
from .target import Target

_VLLM_MEMORY = 0.45  # of the GPU's, as Taper's weights are there too


class Speeds(NamedTuple):
    """Of one length: seconds of a prompt until its first token, and of each token of an output after its first."""

    ttft_s: float
    tpot_s: float


Peer = Callable[[int, Clock], Speeds]  # measures one length within a time budget


class UnavailableError(Exception):
    """A peer that cannot run here; the message says why."""


def taper(engine: Engine, policy: DepthPolicy) -> Peer:
    """Taper itself under a policy; each prompt is a new one, or the cache would hold it."""
    seeds = count(1)

    def run(length: int, clock: Clock) -> Speeds:
        prompt = measure(engine, policy, prompt_tokens=length, seed=next(seeds), clock=clock)
        output = measure(engine, policy, max_tokens=length, clock=clock)
        return Speeds(prompt.ttft_s, output.tpot_s)

    return run


def llama_cpp(target: Target, options: Options) -> Peer:
    """llama.cpp's llama-bench on the same file.

    Raises:
        UnavailableError: it is not installed, or the model is not a GGUF file.
    """
    folder = find_llama_bench(options.llama_bin)
    if folder is None:
        raise UnavailableError("it is not on PATH; name its folder with --llama-bin")
    if target.path is None or target.path.is_dir():
        raise UnavailableError("it runs GGUF files only")
    bench = LlamaBench(folder, target.path, target.threads, on_gpu=target.device == "cuda")

    def run(length: int, clock: Clock) -> Speeds:
        try:
            prompt = bench.measure(prompt_tokens=length, timeout_s=_limit(clock))
            output = bench.measure(max_tokens=length, timeout_s=_limit(clock))
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        return Speeds(length / prompt, 1 / output)

    return run


def transformers(target: Target, options: Options) -> Peer:
    """transformers' `generate` with a static cache, which it compiles on a GPU.

    Raises:
        UnavailableError: it is not installed, or cannot share Taper's weights.
    """
    if find_spec("transformers") is None:
        raise UnavailableError("it is not installed")
    if target.weights is None:
        raise UnavailableError("it is compared on random weights on a GPU, which it shares with Taper")
    import torch

    from .torch_device import synchronize

    model = transformers_model(target.config, target.weights)

    def seconds(prompt_tokens: int, max_tokens: int, clock: Clock) -> float:
        clock.check()
        ids = torch.randint(target.config.vocab_size, (1, prompt_tokens), device=target.device)
        limit = {} if clock.left_s == float("inf") else {"max_time": clock.left_s}
        started = time.perf_counter()
        rest = {"max_new_tokens": max_tokens, "do_sample": False, "cache_implementation": "static", **limit}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **rest)
        synchronize(target.device)
        if out.shape[1] < prompt_tokens + max_tokens:
            raise OutOfTimeError
        return time.perf_counter() - started

    return _from_seconds(seconds)


def vllm(target: Target, options: Options) -> Peer:
    """vLLM on random weights of the same shape, or on the same folder.

    Raises:
        UnavailableError: it is not installed, or does not run this model.
    """
    if find_spec("vllm") is None:
        raise UnavailableError("it is not installed")
    if target.path is not None and not target.path.is_dir():
        raise UnavailableError("it is compared on folders and random weights, not on GGUF files")
    from vllm import LLM, SamplingParams

    length = target.backend.context_length
    rest: dict[str, Any] = {"max_model_len": length, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    if target.device == "cuda":
        rest["gpu_memory_utilization"] = _VLLM_MEMORY
    if target.path is not None:
        llm = LLM(str(target.path), **rest)
    else:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(_vllm_config(target)))
            llm = LLM(folder, load_format="dummy", **rest)

    def seconds(prompt_tokens: int, max_tokens: int, clock: Clock) -> float:
        clock.check()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate({"prompt_token_ids": [1] * prompt_tokens}, params, use_tqdm=False)
        return time.perf_counter() - started

    return _from_seconds(seconds)


PEERS: dict[str, Callable[[Target, Options], Peer]] = {
    "llama.cpp": llama_cpp,
    "transformers": transformers,
    "vLLM": vllm,
}


def open_peers(target: Target, options: Options) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can run here, and why the others cannot."""
    peers, unavailable = {}, {}
    for name, open_peer in PEERS.items():
        try:
            peers[name] = open_peer(target, options)
        except UnavailableError as reason:
            unavailable[name] = str(reason)
        except Exception as error:  # as in `guarded`
            unavailable[name] = one_line(error)
    return peers, unavailable


def guarded(name: str, peer: Peer, unavailable: dict[str, str]) -> Callable[[int, Clock], Speeds | None]:
    """A peer that returns None once it has failed, with the reason in `unavailable`."""

    def run(length: int, clock: Clock) -> Speeds | None:
        if name in unavailable:
            return None
        try:
            return peer(length, clock)
        except OutOfTimeError:
            raise
        except Exception as error:  # whatever another program does must not cost the results of this one
            unavailable[name] = one_line(error)
            return None

    return run


def _from_seconds(seconds: Callable[[int, int, Clock], float]) -> Peer:
    """A peer that tells only how long a whole output takes: times of outputs that differ in length alone."""

    def run(length: int, clock: Clock) -> Speeds:
        ttft = seconds(length, 1, clock)
        first = seconds(1, 1, clock)
        return Speeds(ttft, (seconds(1, length, clock) - first) / (length - 1))

    return run


def _vllm_config(target: Target) -> dict[str, Any]:
    """config.json of a shape."""
    c, dtype = target.config, next(iter((target.weights or {}).values()), None)
    names = [
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
    ]
    config = {name: getattr(c, name) for name in names}
    kind = {"model_type": c.architecture, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    return config | kind | {"dtype": str(getattr(dtype, "dtype", "float32")).removeprefix("torch.")}


def _limit(clock: Clock) -> float | None:
    clock.check()
    return None if clock.left_s == float("inf") else clock.left_s


def one_line(error: Exception) -> str:
    """What went wrong, as one line."""
    return str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}".splitlines()[0][:300]


_PROGRAMS = ("llama-bench", "llama-batched-bench")
_ALL_LAYERS = 999  # more than any model has


@dataclass(frozen=True)
class LlamaBench:
    """llama-bench and llama-batched-bench on one model.

    Args:
        folder: where the programs are.
        model: a GGUF file.
        threads: CPU threads.
        on_gpu: run every layer on the GPU, not on the CPU.
    """

    folder: Path
    model: Path
    threads: int
    on_gpu: bool = False

    def measure(
        self, *, prompt_tokens: int = 0, max_tokens: int = 0, context: int = 0, timeout_s: float | None = None
    ) -> float:
        """Tokens per second of a prompt, or of decoding after so many tokens of context: one repetition, warmed up.

        Args:
            prompt_tokens: of the prompt (`-p`); 0 to measure decoding.
            max_tokens: to decode (`-n`); 0 to measure a prompt.
            context: tokens of context before either (`-d`), which are not timed.
            timeout_s: seconds to give it.

        Raises:
            RequestError: the program failed, or does not know an option.
            subprocess.TimeoutExpired: it took too long.
        """
        assert (prompt_tokens == 0) != (max_tokens == 0), "measure a prompt or decoding"
        arguments = ["-p", prompt_tokens, "-n", max_tokens, "-fa", 1, "-r", 1, "-o", "json"]
        arguments += ["-d", context] if context else []
        (test,) = json.loads(self._run(_PROGRAMS[0], arguments, timeout_s))
        return float(test["avg_ts"])

    def measure_batch(
        self, *, prompt_tokens: int, max_tokens: int, batch: int, timeout_s: float | None = None
    ) -> tuple[float, float]:
        """Tokens per second, of all sequences together, of their prompts and of decoding (`-npp -ntg -npl`).

        Raises:
            RequestError: the program failed, or does not know an option.
            subprocess.TimeoutExpired: it took too long.
        """
        cells = batch * (prompt_tokens + max_tokens + 256)  # each sequence's share is rounded up
        arguments = ["-npp", prompt_tokens, "-ntg", max_tokens, "-npl", batch, "-c", cells, "-fa", "on"]
        output = self._run(_PROGRAMS[1], [*arguments, "--output-format", "jsonl"], timeout_s)
        (line,) = (line for line in output.splitlines() if line.startswith("{"))
        test = json.loads(line)
        return float(test["speed_pp"]), float(test["speed_tg"])

    def _run(self, program: str, arguments: Sequence[Any], timeout_s: float | None) -> str:
        """What a program prints on standard output."""
        layers = _ALL_LAYERS if self.on_gpu else 0
        command = [self.folder / program, "-m", self.model, "-t", self.threads, "-ngl", layers, *arguments]
        words = [str(word) for word in command]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=True)
        except OSError as error:
            raise RequestError(f"cannot run {words[0]}: {error.strerror}", "build llama.cpp anew") from None
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.strip()] or ["it printed nothing"]
            raise RequestError(f"{program} failed: {lines[-1]}", "try a newer llama.cpp") from None
        return done.stdout


def find_llama_bench(given: Path | None = None) -> Path | None:
    """The folder of llama-bench: the one given, or that of the program on PATH; None if it is not installed.

    Raises:
        RequestError: the given folder does not have it.
    """
    if given is None:
        program = shutil.which(_PROGRAMS[0])
        return Path(program).resolve().parent if program else None
    if not os.access(given / _PROGRAMS[0], os.X_OK):
        raise RequestError(f"no program {_PROGRAMS[0]} in {given}", "name the folder with llama.cpp's programs")
    return given


def transformers_model(config: ModelConfig, weights: Mapping[str, Any], attention: str = "sdpa") -> Any:
    """A llama of one of our shapes, which shares the weights; it never ends an output by itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c, embeddings = config, weights["embed_tokens"]
    theirs = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
        attn_implementation=attention,
        dtype=embeddings.dtype,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    names = MODEL_TYPES["llama"].folder_names
    model.load_state_dict({names.theirs(name): weight for name, weight in weights.items()}, assign=True)
    # Buffers are not in the state: a model built on "meta" has no rotary frequencies yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs).to(embeddings.device)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)
