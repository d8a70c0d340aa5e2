"""What missing keys and values cost: the nested rule of skipping layers against rules that are deliberately not nested.

All run in transformers in f32, and skip as many layers at each step. Nested: the first ones of the skip order, so a
layer that is skipped stays so. Rotating: other layers at each step, of twice as many, so a layer runs again after it
was skipped, and its keys and values of those steps are missing. Rotating, filled in: the same layers, but they compute
keys and values from the hidden states that pass them by. The last one tells missing keys and values from the choice of
layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparison import Study, closest_d3, mean_depth
from task_options import compared, losses
from transformers import AutoModelForCausalLM, PreTrainedModel

import taper.hf
from taper import DepthPolicy
from taper.lab.calibration.replay import Reference, Scores
from taper.lab.calibration.search import first_steps
from taper.lab.calibration.statistics import by_completion, free_running, ratio_estimate
from taper.lab.calibration.summary import to_plain

NESTED, ROTATING, FILLED = "nested", "rotating", "rotating, filled in"
ANSWERS, STEPS = 12, 96  # replayed, of each task in turn, and the first steps of each
FREE, FREE_TOKENS = 6, 96  # prompts that are answered freely, and the length of those answers
BINS = (1, 25, 49, 97)
Rule = tuple[DepthPolicy, bool]  # which layers run, and whether skipped ones compute keys and values


class Rotating(DepthPolicy):
    """As many layers skipped at each step as the policy has it, but others each time: not nested, for comparison."""

    @property
    def num_rotating(self) -> int:
        """How many of the first layers of the skip order take turns."""
        return min(len(self.skip_order), 2 * (self.num_hidden_layers - self.min_depth))

    def retained_layers(self, step: int, probability: float = 1.0) -> tuple[int, ...]:
        """Layers run for the token of `step`, ascending; not among those of the step before."""
        pool = self.skip_order[: self.num_rotating]
        skipped = {pool[(step + place) % len(pool)] for place in range(self.num_hidden_layers - self.depth(step))}
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in skipped)


def load_f32(path: Path) -> PreTrainedModel:
    """A model folder or GGUF file in transformers, in f32.

    Its attention takes no mask for a single token, so a layer may have fewer keys than the first one.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, **options).eval()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()


def compare_nesting(study: Study, references: Sequence[Reference], depth: float) -> dict[str, Any]:
    """The rules at one mean depth: replayed on full depth's answers, and left to themselves.

    Depth decays as in D3, along the measured order.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(study.llm.threads or threads)
    try:
        return _compare(load_f32(study.llm.path), study, references, depth)
    finally:
        torch.set_num_threads(threads)


def _compare(model: PreTrainedModel, study: Study, references: Sequence[Reference], depth: float) -> dict[str, Any]:
    replayed = first_steps(references[:ANSWERS], STEPS)
    lengths = [len(reference.completion_ids) for reference in replayed]
    policy = closest_d3(study.num_hidden_layers, study.order, depth, lengths)
    lowest = policy.depth(max(lengths) - 1)  # the curve ends where the answers do
    policy = DepthPolicy.d3(study.num_hidden_layers, policy.schedule.alpha, min_depth=lowest, skip_order=study.order)
    rotating = Rotating(policy.schedule, policy.skip_order)
    rules = {NESTED: (policy, False), ROTATING: (rotating, False), FILLED: (rotating, True)}
    scores = {name: own.where(own.step > 0) for name, own in replay(model, replayed, rules).items()}
    free = free_answers(model, study, [r.prompt_ids for r in references[:FREE]], {NESTED: policy, ROTATING: rotating})
    return {
        "depth": depth,
        "mean_depth": mean_depth(policy, lengths),
        "alpha": policy.schedule.alpha,
        "min_depth": policy.min_depth,
        "rotating_layers": rotating.num_rotating,
        "answers": len(replayed),
        "steps": len(scores[NESTED].step),
        "rules": {name: _figures(own) for name, own in scores.items()},
        "kl_above_nested": _above(scores[ROTATING], scores[NESTED]),
        "kl_of_missing": _above(scores[ROTATING], scores[FILLED]),
        "free": free,
    }


def replay(model: PreTrainedModel, references: Sequence[Reference], rules: Mapping[str, Rule]) -> dict[str, Scores]:
    """What each rule costs at each step of known answers, in one pass an answer."""
    parts: dict[str, list[Scores]] = {name: [] for name in rules}
    every = DepthPolicy.full(model.config.num_hidden_layers)
    for index, reference in enumerate(references):
        count, ids = len(reference.completion_ids), [*reference.prompt_ids, *reference.completion_ids]
        full = forward(model, ids, len(reference.prompt_ids), every)[-count:].log_softmax(-1).numpy()
        for name, (policy, filled) in rules.items():
            own = forward(model, ids, len(reference.prompt_ids), policy, filled)[-count:].log_softmax(-1).numpy()
            depths = [policy.depth(step) for step in range(count)]
            parts[name].append(compared(index, reference, full, own, depths))
    return {name: Scores.joined(own) for name, own in parts.items()}


@torch.no_grad()
def forward(
    model: PreTrainedModel, ids: Sequence[int], prompt_length: int, policy: DepthPolicy, filled: bool = False
) -> torch.Tensor:
    """Logits of a prompt and an answer as decoding the answer step by step computes them: f32 [tokens - 1, V].

    A token that skips a layer passes it unchanged. Its keys and values there are missing for later tokens, unless
    `filled`: then they are computed from what it passed on.
    """
    body, tokens = model.get_decoder(), len(ids) - 1  # the last token is no input
    # The input of step i is the token before it; the prompt's own tokens run as step 0 does.
    steps = [max(0, position - prompt_length + 1) for position in range(tokens)]
    runs = torch.zeros(tokens, policy.num_hidden_layers, dtype=torch.bool)  # [tokens, L]
    for position, step in enumerate(steps):
        runs[position, list(policy.retained_layers(step))] = True
    hidden = body.embed_tokens(torch.tensor([list(ids[:-1])]))  # [1, tokens, hidden]
    positions = torch.arange(tokens)[None]
    rotary = body.rotary_emb(hidden, position_ids=positions)
    earlier = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for number, layer in enumerate(body.layers):
        ran = runs[:, number]
        seen = earlier if filled else earlier & (ran | torch.eye(tokens, dtype=torch.bool))
        mask = torch.zeros(1, 1, tokens, tokens).masked_fill(~seen, torch.finfo(torch.float32).min)
        new = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        hidden = torch.where(ran[None, :, None], new, hidden)
    return model.lm_head(body.norm(hidden))[0]


def free_answers(
    model: PreTrainedModel, study: Study, prompts: Sequence[tuple[int, ...]], policies: Mapping[str, DepthPolicy]
) -> dict[str, Any]:
    """Greedy outputs of the reference implementation under each policy, judged by full depth beside its own."""
    full, written = study.full, {"full": study.full, **policies}
    answers = {name: [_answer(model, study, prompt, one) for prompt in prompts] for name, one in written.items()}
    judged = {name: replay(model, own, {"full": (full, False)})["full"] for name, own in answers.items()}
    return {
        name: to_plain(free_running(answers[name], judged[name], answers["full"], judged["full"])) for name in policies
    }


def _answer(model: PreTrainedModel, study: Study, prompt: tuple[int, ...], policy: DepthPolicy) -> Reference:
    ids = torch.tensor([prompt])
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=FREE_TOKENS,
        do_sample=False,
        eos_token_id=sorted(study.llm.tokenizer.eos_token_ids) or None,
        pad_token_id=0,
        custom_generate=taper.hf.custom_generate(policy, reuse="exact"),
    )
    return Reference(prompt, tuple(written[0, len(prompt) :].tolist()))


def _above(scores: Scores, base: Scores) -> Any:
    """How much higher the KL is, paired by answer."""
    return ratio_estimate(by_completion(scores, scores.kl - base.kl), by_completion(base, np.ones(len(base.step))))


def _figures(scores: Scores) -> dict[str, Any]:
    """KL and agreement over all steps, and by step."""
    rows = []
    for first, end in itertools.pairwise(BINS):
        part = scores.where((scores.step >= first) & (scores.step < end))
        if len(part.step):
            rows.append({"steps": [first, end - 1], **losses(part)})
    return {**losses(scores), "rows": rows}
