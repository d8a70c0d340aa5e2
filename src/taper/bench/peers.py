"""Other programs that run the same model, each behind one function: what a user would have without Taper."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ..engine import Engine
from ..errors import RequestError
from ..policy import DepthPolicy
from .llama_cpp import LlamaBench, find_llama_bench
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
    from .transformers_model import transformers_model

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
