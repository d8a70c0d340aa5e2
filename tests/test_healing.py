"""Healing: the student is the tapered model, training lowers held-out KL, and a kill loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import overlap
import pytest
import torch
from click.testing import CliRunner
from reasoning_prompts import reasoning_prompts
from tiny import FAMILIES, make_backend, make_tiny, policies, random_prompt, with_adapters

import taper
from taper import LLM, DepthPolicy
from taper.cli import cli
from taper.engine import Engine
from taper.errors import PolicyError, RequestError, TaperError
from taper.lab.bench.shapes import SHAPES
from taper.lab.calibration import replay as replay_module
from taper.lab.calibration.problems import builtin_problems
from taper.lab.calibration.replay import Reference, Replay
from taper.lab.healing import precision
from taper.lab.healing import student as student_module
from taper.lab.healing.prompts import builtin_prompts
from taper.lab.healing.student import Student, frozen
from taper.lab.healing.summary import Healing
from taper.lab.healing.train import Training
from taper.models.policies import load_policy, save_policy

pytestmark = pytest.mark.ci

PROMPTS = [f"tell me about number {i}" for i in range(14)]
POLICY = DepthPolicy.d3(6, 0.9, skip_order=[3, 2, 4])
CI_FAMILIES = ("gemma2", "gemma3", "mistral 4", "qwen3")


def reference(seed: int, length: int = 24) -> Reference:
    return Reference(tuple(random_prompt(seed, 9)), tuple(random_prompt(100 + seed, length)))


@pytest.mark.parametrize(
    "family",
    ["llama", "granitemoe", "gpt-oss", "gemma4", *(pytest.param(name, marks=pytest.mark.ci) for name in CI_FAMILIES)],
)
def test_the_student_loses_what_replay_measures(tmp_path, family, monkeypatch):
    """Also with sliding windows, experts and sinks; with adapters and without."""
    monkeypatch.setattr(replay_module, "TOP", 50)
    monkeypatch.setattr(student_module, "TOP", 50)
    architecture, options = FAMILIES.get(family, (family, {}))
    loaded = make_tiny(tmp_path, architecture, **options).load()
    layers, size = loaded.config.num_hidden_layers, loaded.config.hidden_size
    known = [reference(1), reference(2, 17)]
    for plain in (policies(layers)["d3"], policies(layers)["static"], policies(layers)["early exit"]):
        for policy in (plain, with_adapters(plain, size, scale=0.5)):
            scores = Replay(Engine(make_backend("torch", loaded)), known).score(policy)
            student = Student(loaded, policy.skip_order, 64, "cpu")
            pairs = policy.adapters.layers if policy.adapters else {}
            adapters = {i: tuple(torch.tensor(m).float() for m in pair) for i, pair in pairs.items()}
            for index, each in enumerate(known):
                lesson = student.lesson(each)
                depths = [policy.depth(step) for step in range(1, len(each.completion_ids))]
                kl, agrees = student.losses([lesson], [depths], adapters)
                own = scores.where((scores.reference == index) & (scores.step > 0))
                np.testing.assert_allclose(kl.numpy(), own.kl, rtol=5e-3, atol=5e-3)  # it keeps keys and values in f16
                assert agrees.tolist() == own.agreement.astype(bool).tolist()


def test_gradients_flow_to_adapters_alone(tiny_llama):
    student = Student(tiny_llama.load(), POLICY.skip_order, 64, "cpu")
    adapters = student.new_adapters([3, 2], 8, seed=0)
    kl, _ = student.losses([student.lesson(reference(3))], [[4] * 23], adapters)
    kl.sum().backward()
    assert all(up.grad.abs().max() > 0 for _, up in adapters.values())
    assert not any(weight.requires_grad for weight in student._backend._weights.values())


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "granitemoe"])
def test_lessons_together_lose_what_they_lose_alone(tmp_path, family):
    """Also those of which no token runs a layer, or all do."""
    architecture, options = FAMILIES.get(family, (family, {}))
    loaded = make_tiny(tmp_path, architecture, **options).load()
    layers = loaded.config.num_hidden_layers
    student = Student(loaded, range(1, layers), 64, "cpu")
    adapters = student.new_adapters(range(1, layers), 8, seed=0)
    with torch.no_grad():
        for _, up in adapters.values():
            up.normal_(0, 0.1)
    lessons = [student.lesson(reference(seed, length)) for seed, length in ((1, 24), (2, 7), (3, 16))]
    depths = [[layers] * 23, [1] * 6, [max(1, layers - step // 3) for step in range(15)]]
    together, agree = student.losses(lessons, depths, adapters)
    alone = [student.losses([lesson], [one], adapters) for lesson, one in zip(lessons, depths, strict=True)]
    torch.testing.assert_close(together, torch.cat([kl for kl, _ in alone]), rtol=1e-4, atol=1e-5)
    assert torch.equal(agree, torch.cat([agrees for _, agrees in alone]))
    grads = []
    for total in (together.sum(), sum(kl.sum() for kl, _ in alone)):
        grads.append(torch.autograd.grad(total, adapters[2]))
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_a_gpu_takes_as_many_steps_together_as_it_has_room_for():
    most, little, *fitting = (
        student_module.fitting_steps(SHAPES["llama-3-8b"], free) for free in (1 << 50, 0, 24 << 30, 60 << 30, 120 << 30)
    )
    assert (little, most) == (student_module.TOGETHER, student_module.MOST_TOGETHER)
    assert little < fitting[0] < fitting[1] < fitting[2] < most


def test_products_are_of_the_faster_type_if_it_is_worth_the_rounding(monkeypatch):
    seconds = {torch.float32: 1.0, torch.bfloat16: 0.4}
    monkeypatch.setattr(precision, "_seconds", lambda x, matrix: seconds[matrix.dtype])
    assert precision.fastest_dtype("cpu") == "bf16"
    seconds[torch.bfloat16] = 0.9  # too little for what it rounds off
    assert precision.fastest_dtype("cpu") == "f32"


@pytest.mark.parametrize("family", ["llama", "gemma3", "granitemoe", "qwen3"])
def test_products_of_bf16_lose_about_as_much(tmp_path, family):
    architecture, options = FAMILIES.get(family, (family, {}))
    loaded = make_tiny(tmp_path, architecture, **options).load()
    layers = loaded.config.num_hidden_layers
    losses, grads = [], []
    for dtype in ("f32", "bf16"):
        student = Student(loaded, range(1, layers), 64, "cpu", dtype)
        adapters = student.new_adapters([1, 2], 8, seed=0)
        lessons = [student.lesson(reference(seed, length)) for seed, length in ((1, 24), (2, 17))]
        kl, _ = student.losses(lessons, [[layers - 2] * lesson.num_steps for lesson in lessons], adapters)
        kl.mean().backward()
        losses.append(float(kl.detach().mean()))
        grads.append(torch.cat([up.grad.flatten() for _, up in adapters.values()]))
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.01)
    assert torch.cosine_similarity(*grads, dim=0) > 0.9  # a router may choose other experts


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_the_divergence_has_the_gradient_that_pytorch_finds(rows):
    generator = torch.Generator().manual_seed(rows)
    logits, full = torch.randn(2, rows, 80, generator=generator)
    logits.requires_grad_()
    top = full.log_softmax(-1).topk(12, -1)
    kl, agrees = student_module._Divergence.apply(logits, top.indices, top.values)
    log_q = logits.log_softmax(-1).gather(-1, top.indices)
    p_rest, q_rest = (1 - x.exp().sum(-1) for x in (top.values, log_q))
    slow = (top.values.exp() * (top.values - log_q)).sum(-1) + p_rest * (p_rest / q_rest).log()
    torch.testing.assert_close(kl, slow, rtol=1e-4, atol=1e-5)
    assert torch.equal(agrees, logits.argmax(-1) == full.argmax(-1))
    weights = torch.rand(rows, generator=generator)
    wanted = torch.autograd.grad((slow * weights).sum(), logits)
    torch.testing.assert_close(torch.autograd.grad((kl * weights).sum(), logits), wanted, rtol=1e-3, atol=1e-5)


def test_no_prompt_is_a_problem_of_gsm8k_or_bbh():
    known = set(np.fromfile(overlap.FILE, np.uint32).tolist())
    janet = "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast"
    assert known & set(overlap.fingerprints(f"Solve this: {janet}")), "the first problem of GSM8K's test split"
    for prompt in (*builtin_prompts(), *reasoning_prompts()):
        assert not known & set(overlap.fingerprints(prompt)), prompt


def test_no_reasoning_prompt_is_like_a_word_problem_that_is_measured():
    measured = [problem.prompt for level in builtin_problems() for problem in level]
    known = {fingerprint for prompt in measured for fingerprint in overlap.fingerprints(prompt)}
    for prompt in reasoning_prompts():
        assert not known & set(overlap.fingerprints(prompt)), prompt


@pytest.fixture(scope="module")
def llm(tiny_gguf) -> LLM:
    return LLM(str(tiny_gguf), threads=1, max_batch_size=16, context=256)


@contextmanager
def short_trainings() -> Iterator[None]:
    """Few steps, as time passes by the number of times that it is asked for; and short outputs, few in a step."""
    ticks = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: next(ticks) * 0.04)
        patch.setattr("taper.lab.healing.student.TOGETHER", 96)
        patch.setattr("taper.lab.healing.stages.OUTPUT_TOKENS", 48)
        patch.setattr("taper.lab.healing.stages.fastest_dtype", lambda device: "f32")  # its trial takes seconds
        yield


@pytest.fixture
def short():
    with short_trainings():
        yield


@pytest.fixture(scope="module")
def healed(llm, tmp_path_factory) -> Healing:
    """A training that helps."""
    with short_trainings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAPER_CACHE", str(tmp_path_factory.mktemp("healed")))
        return taper.heal(llm, POLICY, PROMPTS, minutes=0.08, rank=16)


def test_training_lowers_the_kl_of_held_out_prompts(llm, healed):
    assert healed.helped
    assert healed.history[-1].tokens == healed.tokens > 0
    assert healed.after.held_out.all_steps.kl.value < healed.before.held_out.all_steps.kl.value
    assert set(healed.policy.adapters.layers) == {3, 2, 4}
    assert healed.policy.provenance["healing"]["helped"]
    assert llm.generate("hello", policy=healed.policy, ignore_eos=True).depths[-1] == 3


@pytest.mark.ci
def test_training_goes_on_from_adapters_that_a_policy_has(llm, healed, short):
    second = taper.heal(llm, healed.policy, PROMPTS, minutes=0.08)
    # What is computed with other tokens at a time rounds otherwise.
    losses = (second.before.held_out.all_steps, healed.after.held_out.all_steps)
    assert losses[0].kl.value == pytest.approx(losses[1].kl.value, rel=1e-4)
    assert losses[0].agreement == losses[1].agreement
    assert second.helped
    assert {len(down) for down, _ in second.policy.adapters.layers.values()} == {16}
    assert second.policy.provenance["healing"]["went_on_from"] == healed.policy.provenance["healing"]


@pytest.mark.ci
def test_layers_without_an_adapter_get_one_of_the_same_rank(llm, short):
    healed = taper.heal(llm, with_adapters(POLICY, 64, rank=4), PROMPTS, minutes=0.04)
    assert {layer: len(down) for layer, (down, _) in healed.policy.adapters.layers.items()} == {3: 4, 2: 4, 4: 4}


def test_new_adapters_begin_where_trained_ones_ended(tiny_llama):
    student = Student(tiny_llama.load(), POLICY.skip_order, 64, "cpu")
    trained = with_adapters(POLICY, 64).adapters.only([3, 2])
    begun = frozen(student.new_adapters([3, 2, 4], 8, 0, trained))
    assert begun.only([3, 2]) == trained
    down, up = begun.layers[4]
    assert down.shape == (8, 64)
    assert not up.any()


@pytest.mark.ci
def test_a_killed_training_goes_on_where_it_was(llm, short, monkeypatch, tmp_path):
    options = {"minutes": 0.1, "rank": 8}
    seen = []

    def kill(evaluation):
        seen.append(evaluation)
        if len(seen) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("taper.lab.healing.train.CHECKPOINT_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        taper.heal(llm, POLICY, PROMPTS, report=kill, **options)
    checkpoints = list((tmp_path / "taper-cache" / "heal").iterdir())
    assert len(checkpoints) == 1
    healing = taper.heal(llm, POLICY, PROMPTS, **options)
    assert healing.history[:3] == seen[:3]
    seconds = [evaluation.elapsed_s for evaluation in healing.history]
    assert seconds == sorted(set(seconds))  # what was trained before the end is not trained again
    assert seconds[-1] == pytest.approx(6, abs=0.5)
    again = taper.heal(llm, POLICY, PROMPTS, **options)
    assert again.history == healing.history  # a finished training is not trained again
    for seed in range(1, 4):
        taper.heal(llm, POLICY, PROMPTS, seed=seed, minutes=0.02, rank=8)
    assert len(list(checkpoints[0].parent.iterdir())) == 3
    assert not checkpoints[0].exists()


@pytest.mark.ci
def test_a_damaged_checkpoint_is_removed(llm, short, tmp_path):
    options = {"minutes": 0.02, "rank": 8}
    taper.heal(llm, POLICY, PROMPTS, **options)
    (checkpoint,) = (tmp_path / "taper-cache" / "heal").iterdir()
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    with pytest.raises(RequestError, match="damaged"):
        taper.heal(llm, POLICY, PROMPTS, **options)
    assert taper.heal(llm, POLICY, PROMPTS, **options).tokens > 0


def test_minutes_that_outputs_use_up_are_too_few(llm, short):
    with pytest.raises(RequestError, match="give more minutes"):
        taper.heal(llm, POLICY, PROMPTS, minutes=1e-6, rank=8)


def test_outputs_that_end_before_the_curve_falls_are_seen_at_fewer_layers(tiny_llama):
    policy = DepthPolicy.d3(6, 0.9, start=99, skip_order=[3, 2, 4])
    student = Student(tiny_llama.load(), policy.skip_order, 64, "cpu")
    training = Training(student, policy, [3, 2, 4], 8, 1e9, seed=1)
    rng = np.random.default_rng(0)
    assert all(max(training._depths(23, rng)) < 6 for _ in range(50))
    assert all(np.isfinite(training._step([[reference(4)]])) for _ in range(4))


def test_a_checkpoint_holds_all_of_a_training(tiny_llama, tmp_path):
    student = Student(tiny_llama.load(), POLICY.skip_order, 64, "cpu")
    known, policy = [reference(seed) for seed in (4, 5)], POLICY

    def training() -> Training:
        return Training(student, policy, [3, 2, 4], 8, 1e9, seed=1)

    def steps(one: Training, count: int) -> list[float]:
        return [one._step([known]) for _ in range(count)]

    whole, broken, again = training(), training(), training()
    expected = steps(whole, 6)
    assert steps(broken, 3) == expected[:3]
    broken.save(tmp_path / "half.safetensors")
    again.restore(tmp_path / "half.safetensors")
    assert steps(again, 3) == pytest.approx(expected[3:], rel=1e-5)


@pytest.mark.ci
def test_the_command_writes_a_policy_that_generates(tiny_gguf, tmp_path, short):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    (tmp_path / "policy.json").write_text(POLICY.to_json())
    files = ["--policy", tmp_path / "policy.json", "--prompts", tmp_path / "prompts.txt", "--model", tiny_gguf]
    out = tmp_path / "healed.safetensors"
    command = ["heal", *map(str, files), "--minutes", "0.05", "--rank", "8", "--threads", "1", "--out", str(out)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert "after" in result.output
    assert load_policy(out).adapters.layers[3][0].shape == (8, 64)
    generated = CliRunner().invoke(cli, ["generate", "hi", "--model", str(tiny_gguf), "--policy", str(out), "--json"])
    assert generated.exit_code == 0, generated.output
    assert json.loads(generated.stdout)["text"]


@pytest.mark.ci
def test_what_does_not_help_is_not_written(tiny_gguf, tmp_path, monkeypatch, short):
    monkeypatch.setattr(Healing, "helped", False)
    (tmp_path / "policy.json").write_text(POLICY.to_json())
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    files = ["--policy", tmp_path / "policy.json", "--prompts", tmp_path / "prompts.txt", "--model", tiny_gguf]
    command = ["heal", *map(str, files), "--minutes", "0.01", "--threads", "1", "--out"]
    command.append(str(tmp_path / "out.safetensors"))
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1
    assert "did not fall" in result.output
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("policy", "options", "error"),
    [
        (POLICY, {"minutes": 0}, RequestError),
        (POLICY, {"rank": 0}, RequestError),
        (POLICY, {"prompts": ["one", "two"]}, RequestError),
        (POLICY, {"prompts": "one text"}, RequestError),
        (DepthPolicy.full(6), {}, RequestError),
        (DepthPolicy.d3(6, 1.0, skip_order=[3, 2]), {}, RequestError),
        (DepthPolicy.d3(7, 0.9, skip_order=[1]), {}, PolicyError),
        (with_adapters(POLICY, 64), {"rank": 8}, RequestError),
    ],
)
def test_mistakes_are_told_before_training(llm, policy, options, error):
    with pytest.raises(error) as raised:
        taper.heal(llm, policy, **{"prompts": PROMPTS, **options})
    assert isinstance(raised.value, TaperError)


def test_builtin_prompts_are_many_different_and_the_same_each_time():
    prompts = builtin_prompts()
    assert len(set(prompts)) == len(prompts) > 650
    assert prompts == builtin_prompts()


def calibrate_command(tiny_gguf: Path, tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    files = ["--model", tiny_gguf, "--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "found.safetensors"]
    return ["calibrate", *map(str, files), "--max-kl", "90", "--answer-tokens", "32", "--threads", "1", *more]


@pytest.mark.ci
def test_calibration_keeps_the_order_and_the_adapters_of_a_healed_policy(llm, tiny_gguf, tmp_path):
    healed = with_adapters(POLICY, 64)
    result = taper.calibrate(llm, PROMPTS, max_kl=90.0, answer_tokens=32, healed=healed)
    adapted, layers = healed.adapted_layers, result.policy.adapters.layers
    assert result.policy.skip_order[: len(adapted)] == adapted == (3, 2)
    assert set(layers) == set(result.policy.skip_order[: 6 - result.policy.min_depth])
    assert all(layers[layer] is healed.adapters.layers[layer] for layer in layers)
    save_policy(tmp_path / "healed.safetensors", healed)
    command = calibrate_command(tiny_gguf, tmp_path, "--adapters", str(tmp_path / "healed.safetensors"))
    run = CliRunner().invoke(cli, command)
    assert run.exit_code == 0, run.output
    assert load_policy(tmp_path / "found.safetensors").skip_order[: len(adapted)] == adapted
    from_file = taper.calibrate(llm, PROMPTS, max_kl=90.0, answer_tokens=32, healed=tmp_path / "healed.safetensors")
    assert from_file.policy.schedule == result.policy.schedule
    with pytest.raises(RequestError, match="has no adapters"):
        taper.calibrate(llm, PROMPTS, max_kl=90.0, healed=POLICY)


@pytest.mark.ci
@pytest.mark.parametrize("helped", [True, False])
def test_calibration_with_healing_writes_only_adapters_that_help(tiny_gguf, tmp_path, monkeypatch, helped):
    trained = []

    def heal(llm, policy, **options):
        trained.append(policy)
        return SimpleNamespace(policy=with_adapters(policy, 64), helped=helped)

    monkeypatch.setattr("taper.lab.healing.run.heal", heal)
    run = CliRunner().invoke(cli, calibrate_command(tiny_gguf, tmp_path, "--heal", "0.1"))
    assert run.exit_code == (0 if helped else 1), run.output
    assert (tmp_path / "found.safetensors").exists() == helped
    assert helped or "did not help" in run.output
    assert trained[0].adapters is None
