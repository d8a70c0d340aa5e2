"""Mutations of every kind of file that Taper reads: each is refused with one line, or loads and runs.

    python tests/fuzz.py --count 20000
    python tests/fuzz.py --kind gguf --first 1234 --count 1

Every kind runs in a process of its own, which native code could end or keep for ever; the next process then goes on
after that case. Prints counts for each kind, and the failures, as JSON: research/results/fuzz.json is such a report.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

from taper.backends import open_backend
from taper.engine import Engine, Request
from taper.errors import TaperError
from taper.models import load_model
from taper.models.policies import load_policy, save_policy
from taper.models.tokenizer import TextStream
from taper.policy import DepthPolicy
from taper.sampling import SamplingParams

SECONDS, MEMORY = 60, 4 << 30  # that a case may take, and its process
ODD_FLOATS = [int.from_bytes(struct.pack("<f", x), "little") for x in (math.nan, math.inf, -1.0, 0.3, 1e38, 1e-45)]
HUGE = [0, 1, 3, 127, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1]
DEEP = "nested deeply"  # stands for a list in a list, 50,000 times
VALUES = [
    *(None, True, False, 0, -1, 1, 2, 7, 64, 1 << 31, 1 << 63, 10**400, -0.5, 1e308, 5e-324),
    *(float("nan"), float("inf"), "", "a", "x" * 100_000, "\x1b[31mred\x07", "\u202e", "\ud800", "\0", "llama"),
    *(DEEP, [], {}, [[]], [None], [1, "a"]),
]
KINDS = ("gguf", "header", "config", "safetensors", "tokenizer", "policy", "adapters")
CONFIG_KEYS = [
    *("rope_scaling", "rope_parameters", "quantization_config", "layer_types", "sliding_window", "use_sliding_window"),
    *("hidden_act", "partial_rotary_factor", "mlp_bias", "attention_bias", "head_dim", "eos_token_id"),
]
CONFIG_KEYS += [
    *("num_local_experts", "num_experts_per_tok", "norm_topk_prob", "no_rope_layers", "no_rope_layer_interval"),
    *("embedding_multiplier", "logits_scaling", "query_pre_attn_scalar", "original_max_position_embeddings"),
]
TOKENIZER_KEYS, POLICY_KEYS = ["chat_template", "bos_token"], ["name", "model", "alpha", "start", "provenance"]


def mutated(data: bytes, rng: random.Random, header: int | None = None) -> bytes:
    """`data` with one to three random changes to its first `header` bytes, or anywhere."""
    header = max(1, len(data) if header is None else header)
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(max(1, min(header, len(data)))), rng.choice([1, 4, 8, 40])
        number = rng.choice([*HUGE, rng.getrandbits(64)])
        old, width = data[at : at + size] or b"\0", min(size, 8)
        changes = [
            bytes([old[0] ^ 1 << rng.randrange(8)]) + old[1:],
            rng.randbytes(1) + old[1:],
            number.to_bytes(8, "little")[:width] + old[width:],
            b"",
            old * 2,
        ]
        data = data[:at] + rng.choice(changes) + data[at + size :]
    return data[: rng.randrange(header)] if rng.random() < 0.05 else data


def with_other_facts(path: Path, rng: random.Random) -> bytes:
    """A GGUF file with other values at one to three of its architecture's keys, or without these keys."""
    data, fields = bytearray(path.read_bytes()), gguf.GGUFReader(path).fields
    prefix = f"{fields['general.architecture'].contents()}."
    facts = [field for name, field in fields.items() if name.startswith(prefix)]
    for field in rng.sample(facts, rng.randint(1, 3)):
        index = rng.choice([1, *field.data, *field.data])  # 1: the name of the key
        at, size = field.offset + sum(part.nbytes for part in field.parts[:index]), field.parts[index].nbytes
        old = int.from_bytes(data[at : at + size], "little")
        new = rng.choice([old + 1, old - 1, 2 * old, old // 2, *HUGE, *ODD_FLOATS, rng.getrandbits(64)])
        data[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(data)


def restructured(data: Any, rng: random.Random, keys: Sequence[str]) -> Any:
    """JSON data with one change somewhere in it: a key lost, added or renamed, a value of another kind, and so on."""
    if type(data) in (int, float) and rng.random() < 0.5:
        return rng.choice([data + 1, data - 1, data * 2, data // 2, -data])
    if not isinstance(data, (dict, list)) or not data or rng.random() < 0.1:
        return rng.choice([*VALUES, [data], {"a": data}, [data, data]])
    place = rng.choice(list(data)) if isinstance(data, dict) else rng.randrange(len(data))
    data = dict(data) if isinstance(data, dict) else list(data)
    change = rng.randrange(8)
    if change == 0:
        del data[place]
    elif change == 1:
        other = rng.choice(list(data)) if isinstance(data, dict) else rng.randrange(len(data))
        data[place], data[other] = data[other], data[place]
    elif change == 2 and isinstance(data, dict):
        data[rng.choice([*keys, *data, "", "x" * 5000, "\x1b[31m"])] = rng.choice(VALUES)
    elif change == 3 and isinstance(data, list):
        data.insert(place, rng.choice([data[place], *VALUES]))
    else:
        data[place] = restructured(data[place], rng, keys)
    return data


def mutated_json(text: bytes, rng: random.Random, keys: Sequence[str] = ()) -> bytes:
    """Changes to the bytes of JSON text, or to what it says."""
    if rng.random() < 0.2:
        return mutated(text, rng)
    data = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        data = restructured(data, rng, keys)
    return json.dumps(data).replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).encode()


def with_odd_numbers(data: bytes, start: int, rng: random.Random) -> bytes:
    """`data` with some of the numbers from `start` on infinite, huge, not a number, or anything."""
    for _ in range(rng.randint(1, 4)):
        odd = rng.choice([b"\xff", b"\x7f\x80"[::-1], b"\x47\x9c"[::-1], b"\0\0\x80\x7f", rng.randbytes(4)])
        at = rng.randrange(start, len(data)) if start < len(data) else 0
        data = data[:at] + (odd * 32)[: len(data) - at] + data[at + len(odd * 32) :]
    return data


class Cases:
    """Writes the files of a case and runs it. `folder` holds what is mutated: `make_models` filled it."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.model = load_model(folder / "f32")
        self.backend = open_backend(self.model, device="cpu", context_length=64, num_slots=2, threads=1)

    def write(self, name: str, content: bytes) -> Path:
        """A file of its own: the last one may still be mapped."""
        path = self.scratch / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        return path

    def copy(self, source: str) -> Path:
        """A model folder of links, of which files are then replaced."""
        for file in self.scratch.iterdir():
            file.unlink()
        for file in (self.folder / source).iterdir():
            (self.scratch / file.name).symlink_to(file)
        return self.scratch

    def gguf(self, rng: random.Random) -> Counter:
        data = rng.choice(sorted(self.folder.glob("*.gguf"))).read_bytes()
        header = data.rindex(b".weight") + 40
        changed = with_odd_numbers(data, header + 32, rng) if rng.random() < 0.2 else mutated(data, rng, header)
        return self.load(self.write("mutated.gguf", changed))

    def header(self, rng: random.Random) -> Counter:
        path = rng.choice(sorted(self.folder.glob("*.gguf")))
        return self.load(self.write("mutated.gguf", with_other_facts(path, rng)))

    def config(self, rng: random.Random) -> Counter:
        folders = {file.parent.name for file in self.folder.glob("*/config.json")} - {"bf16"}
        path = self.copy(rng.choice(sorted(folders)))
        text = (path / "config.json").read_bytes()
        self.write("config.json", mutated_json(text, rng, CONFIG_KEYS))
        return self.load(path)

    def safetensors(self, rng: random.Random) -> Counter:
        path = self.copy(rng.choice(["f32", "bf16"]))
        data = (path / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        change = rng.randrange(4)
        if change == 0:
            header = mutated_json(data[8:end], rng)
            data = len(header).to_bytes(8, "little") + header + data[end:]
        elif change == 1:
            data = mutated(data, rng, end)
        elif change == 2:
            data = with_odd_numbers(data, end, rng)
        else:
            names = json.loads(data[8:end])
            index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
            self.write("model.safetensors.index.json", mutated_json(json.dumps(index).encode(), rng))
        self.write("model.safetensors", data)
        return self.load(path)

    def tokenizer(self, rng: random.Random) -> Counter:
        path = self.copy("f32")
        if rng.random() < 0.2:
            name = rng.choice(["tokenizer_config.json", "generation_config.json"])
            self.write(name, mutated_json((path / name).read_bytes(), rng, TOKENIZER_KEYS))
        else:
            text = rng.choice(sorted((self.folder / "tokenizers").iterdir())).read_bytes()
            self.write("tokenizer.json", mutated_json(text, rng))
        return self.load(path)

    def policy(self, rng: random.Random) -> Counter:
        bases = [DepthPolicy.middle_first(4, 0.9), DepthPolicy.skipdecode(4, 2, 20), DepthPolicy.static(4, 2, [1, 2])]
        text = rng.choice(bases).to_json().encode()
        policy = load_policy(self.write("policy.json", mutated_json(text, rng, POLICY_KEYS)))
        retained = [set(policy.retained_layers(step)) for step in range(50)]
        assert all(now <= before for before, now in pairwise(retained)), "layers come back"
        assert all(policy.core_layers <= now for now in retained), "a core layer is skipped"
        return Counter(loaded=1) + self.generate(self.backend, policy)

    def adapters(self, rng: random.Random) -> Counter:
        data = (self.folder / "adapters.safetensors").read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header, change = json.loads(data[8:end]), rng.randrange(4)
        if change == 0:
            said = header["__metadata__"]["taper_policy"].encode()
            header["__metadata__"]["taper_policy"] = mutated_json(said, rng, POLICY_KEYS).decode(errors="replace")
            text = json.dumps(header).encode()
            data = len(text).to_bytes(8, "little") + text + data[end:]
        elif change == 1:
            text = mutated_json(data[8:end], rng)
            data = len(text).to_bytes(8, "little") + text + data[end:]
        else:
            data = mutated(data, rng, end) if change == 2 else with_odd_numbers(data, end, rng)
        policy = load_policy(self.write("mutated.safetensors", data))
        return Counter(loaded=1) + self.generate(self.backend, policy)

    def load(self, path: Path) -> Counter:
        """Load a model, and run what loads."""
        model = load_model(path)
        outcome = Counter(loaded=1)
        try:
            length = min(64, model.config.max_position_embeddings)
            backend = open_backend(model, device="cpu", context_length=length, num_slots=2, threads=1)
            layers = model.config.num_hidden_layers
            outcome += self.generate(backend, DepthPolicy.middle_first(layers, 0.9) if layers > 1 else None)
            backend.close()
            stream = TextStream(model.tokenizer)
            for token_id in model.tokenizer.encode("Why, hello! é 😀"):
                stream.push(token_id)
            stream.flush()
            model.tokenizer.render([{"role": "user", "content": "hi"}])
        except TaperError as error:
            check_line(error)
        return outcome

    def generate(self, backend: Any, policy: Any) -> Counter:
        """Complete a prompt greedily and at random, together."""
        vocab_size, length = backend.config.vocab_size, backend.context_length
        prompt = [index % vocab_size for index in range(5)][: length - 1]
        full = DepthPolicy.full(backend.config.num_hidden_layers)
        requests = [
            Request(prompt, SamplingParams(max_tokens=4, ignore_eos=True, temperature=temperature, seed=1), each)
            for temperature, each in ((0.0, full), (0.9, policy or full), (0.0, policy or full))
        ]
        try:
            completions = Engine(backend).complete(requests)
        except TaperError as error:
            check_line(error)
            return Counter()
        assert all(0 <= token_id < vocab_size for ids in completions for token_id in ids)
        whole = min(4, length - len(prompt))
        return Counter({"not a number" if min(map(len, completions)) < whole else "ran": 1})


def check_line(error: Exception) -> None:
    """What a user sees of an error is one line of plain text."""
    assert str(error), "an empty message"
    assert str(error).isprintable(), str(error)


def work(kind: str, first: int, count: int, folder: Path, log: Path) -> None:
    """Run cases and print an outcome for each. What else is printed, by native code too, goes to `log`: a failure."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    results = os.fdopen(os.dup(1), "w", buffering=1)
    with log.open("wb") as file, tempfile.TemporaryDirectory() as scratch:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        cases = Cases(folder, Path(scratch))
        for seed in range(first, first + count):
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            outcome: Counter | str
            try:
                outcome = getattr(cases, kind)(random.Random(f"{kind} {seed}"))
            except TaperError as error:
                check_line(error)
                outcome = Counter(refused=1)
            except BaseException:
                outcome = traceback.format_exc()[-3000:]
            if log.stat().st_size:
                outcome = f"printed: {log.read_text(errors='replace')[-3000:]}"
                os.ftruncate(file.fileno(), 0)
                file.seek(0)
            print(json.dumps(outcome), file=results)
        faulthandler.cancel_dump_traceback_later()


def run(kind: str, first: int, count: int, folder: Path) -> tuple[Counter, list[dict[str, Any]]]:
    """Counts and failures of some cases of a kind; a process that ends early is one."""
    counts: Counter = Counter(refused=0, loaded=0, ran=0) | Counter({"not a number": 0})
    failures, end = [], first + count
    log = folder / f"{kind}.log"
    while first < end:
        command = [sys.executable, "-X", "faulthandler", __file__, "--worker", "--kind", kind, "--folder", folder]
        command += ["--first", first, "--count", end - first]
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            outcome = json.loads(line)
            if isinstance(outcome, str):
                failures.append({"kind": kind, "seed": first, "failure": outcome})
            else:
                counts.update(outcome)
            first += 1
        if process.wait() != 0:
            printed = log.read_text(errors="replace")[-3000:]
            failures.append({"kind": kind, "seed": first, "failure": f"exit {process.returncode}: {printed}"})
            first += 1
    return counts, failures


def make_models(folder: Path) -> None:
    """The files to mutate: a tiny model in f32 and bf16, as GGUF with two kinds of vocabulary, one of each other family
    as folder and as GGUF, and tokenizers."""
    import numpy as np
    from tiny import FAMILIES, PLAIN, make_tiny, tokenizers, with_adapters, write_gguf

    tiny = make_tiny(folder / "f32", layers=4)
    for name in ("byte-level", "sentencepiece"):
        write_gguf(folder / f"{name}.gguf", tiny, np.float32, vocabulary=name)
    for name, (architecture, options) in (PLAIN | FAMILIES).items():
        by_layer = {key: value[-4:] for key, value in options.items() if isinstance(value, list)}
        four = options | by_layer | {"layers": 4}
        write_gguf(folder / f"{name}.gguf", make_tiny(folder / name, architecture, **four))
    save_policy(folder / "adapters.safetensors", with_adapters(DepthPolicy.d3(4, 0.8, skip_order=[1, 2]), 64, rank=8))
    shutil.copytree(folder / "f32", folder / "bf16")
    tiny.hf.bfloat16().save_pretrained(folder / "bf16")
    (folder / "tokenizers").mkdir()
    for name, tokenizer in tokenizers().items():
        tokenizer.save(str(folder / "tokenizers" / f"{name}.json"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first case's seed")
    parser.add_argument("--kind", choices=KINDS, help="this kind only")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.kind, options.first, options.count, options.folder, options.folder / f"{options.kind}.log")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        make_models(Path(temporary))
        kinds, failures = {}, []
        for kind in [options.kind] if options.kind else KINDS:
            counts, failed = run(kind, options.first, options.count, Path(temporary))
            kinds[kind] = dict(counts)
            failures += failed
    command, date = " ".join(["python", "tests/fuzz.py", *sys.argv[1:]]), time.strftime("%Y-%m-%d")
    report = {"command": command, "date": date, "count": options.count, "counts": kinds, "failures": failures}
    print(json.dumps(report, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
