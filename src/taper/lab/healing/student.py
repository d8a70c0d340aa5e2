"""The tapered model with gradients for its adapters alone, and full depth's distribution as its target.

Nothing is computed twice: a `Lesson` keeps what full depth says of a completion, the keys and values of its prompt, and
the hidden states below the first layer that is ever skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ...adapters import Adapters
from ...backends.torch import Rotations, TorchBackend, adapt, visible_cells
from ...models.tensors import LoadedModel
from ...policy import DepthPolicy, active_prefixes
from ..calibration.replay import Reference

TOP = 256  # tokens of full depth's distribution that a target keeps; all others share one bucket
TOGETHER = 4  # lessons in one forward
_TINY = 1e-6  # least probability of the bucket, which rounding may leave empty

AdapterParameters = Mapping[int, tuple[torch.Tensor, torch.Tensor]]  # `down` and `up` by layer, f32


@dataclass(frozen=True)
class Lesson:
    """A completion that adapters learn from; T = its tokens after the first, which are predicted at tapered steps."""

    prompt_length: int
    hidden_states: torch.Tensor  # f32 [T, hidden_size], what enters the first layer that may be skipped
    # By layer, keys and values f16 [prompt, heads, head_dim].
    prompt_cache: dict[int, tuple[torch.Tensor, torch.Tensor]]
    top_ids: torch.Tensor  # int64 [T, TOP], full depth's likeliest tokens, the argmax first
    top_logprobs: torch.Tensor  # f32 [T, TOP]

    @property
    def num_steps(self) -> int:
        """Tapered steps, T."""
        return len(self.top_ids)


class Student:
    """The frozen weights of a model in f32, and the layers that `skip_order` may skip."""

    def __init__(self, model: LoadedModel, skip_order: Sequence[int], context_length: int, device: str) -> None:
        self._backend = TorchBackend(
            model.config, model.tensors, num_slots=1, context_length=context_length, dtype="f32", device=device
        )
        self.config, self.skip_order, self.first_layer = model.config, tuple(skip_order), min(skip_order)
        self._group = model.config.num_attention_heads // model.config.num_key_value_heads

    def lesson(self, reference: Reference) -> Lesson:
        """Run full depth once over a prompt and a completion of at least two tokens."""
        prompt, cache, hidden_states = len(reference.prompt_ids), {}, torch.empty(0)
        token_ids = [*reference.prompt_ids, *reference.completion_ids[:-1]]
        positions = torch.arange(len(token_ids), device=self._backend.device)
        with torch.no_grad():
            rotations, x = self._backend.rotations(positions), self._backend.embed(self._put(np.array(token_ids)))
            for layer in range(self.config.num_hidden_layers):
                if layer == self.first_layer:
                    hidden_states = x[prompt:]
                q, k, v = self._project(x, layer, rotations)
                if layer >= self.first_layer:
                    cache[layer] = (k[:prompt].half().cpu(), v[:prompt].half().cpu())
                x = self._backend.finish_layer(x, self._attend(q, k, v, layer), layer)
            top = self._backend.logits(x[prompt:]).log_softmax(-1).topk(min(TOP, self.config.vocab_size), -1)
        return Lesson(prompt, hidden_states.cpu(), cache, top.indices.cpu(), top.values.cpu())

    def losses(
        self, lessons: Sequence[Lesson], depths: Sequence[Sequence[int]], adapters: AdapterParameters
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """KL(full || tapered) in nats at each step of the lessons, [steps], and whether the argmax is the same, bool.

        The steps of a lesson follow those of the lesson before it. All share every product; only their attention is
        apart. The depths of a lesson's steps never rise. Gradients flow to the adapters of skipped layers.
        """
        rows = [self._put(lesson.hidden_states) for lesson in lessons]
        layers = self.config.num_hidden_layers
        active = [active_prefixes(self.skip_order, layers, own) for own in depths]
        for layer in range(self.first_layer, layers):
            counts = [prefixes[layer] for prefixes in active]
            run = torch.cat([x[:n] for x, n in zip(rows, counts, strict=True)])
            skip = torch.cat([x[n:] for x, n in zip(rows, counts, strict=True)])
            if len(run):
                run = self._run_layer(run, layer, lessons, counts)
            if len(skip) and layer in adapters:
                skip = adapt(skip, *adapters[layer])
            skipped = skip.split([len(x) - n for x, n in zip(rows, counts, strict=True)])
            rows = [torch.cat(parts) for parts in zip(run.split(counts), skipped, strict=True)]
        return self._compare(self._backend.logits(torch.cat(rows)), lessons)

    def _run_layer(self, x: torch.Tensor, layer: int, lessons: Sequence[Lesson], counts: Sequence[int]) -> torch.Tensor:
        """A layer on rows x: the first `counts` steps of each lesson, one lesson after the other."""
        starts = [lesson.prompt_length for lesson in lessons]
        positions = [torch.arange(start, start + n, device=x.device) for start, n in zip(starts, counts, strict=True)]
        projected = self._project(x, layer, self._backend.rotations(torch.cat(positions)))
        attended = []
        for lesson, q, k, v in zip(lessons, *(part.split(list(counts)) for part in projected), strict=True):
            if len(q):
                past_k, past_v = (self._put(past).float() for past in lesson.prompt_cache[layer])
                attended.append(self._attend(q, torch.cat((past_k, k)), torch.cat((past_v, v)), layer))
        return self._backend.finish_layer(x, torch.cat(attended), layer)

    def new_adapters(self, layers: Sequence[int], rank: int, seed: int) -> AdapterParameters:
        """Adapters that change nothing yet: `down` is random, `up` zero."""
        size, device = self.config.hidden_size, self._backend.device
        generator = torch.Generator().manual_seed(seed)
        downs = {layer: torch.randn(rank, size, generator=generator) / size**0.5 for layer in layers}
        return {
            layer: (down.to(device).requires_grad_(), torch.zeros(size, rank, device=device, requires_grad=True))
            for layer, down in downs.items()
        }

    def _compare(self, logits: torch.Tensor, lessons: Sequence[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._put(torch.cat([lesson.top_ids for lesson in lessons]))
        p = self._put(torch.cat([lesson.top_logprobs for lesson in lessons]))
        q = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
        p_rest, q_rest = ((1 - x.exp().sum(-1)).clamp_min(_TINY) for x in (p, q))
        kl = (p.exp() * (p - q)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())
        return kl, logits.argmax(-1) == ids[:, 0]

    def _project(self, x: torch.Tensor, layer: int, rotations: Rotations) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of hidden states x [n, hidden_size] before a layer: each [n, heads, head_dim]."""
        h = self._backend.attention_input(x, layer)
        return self._backend.queries(h, layer, rotations), *self._backend.keys_values(h, layer, rotations)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the last tokens, q [n, heads, head_dim], over all: k, v [cells, key-value heads, head_dim]."""
        spec = self.config.layers[layer]
        positions = torch.arange(len(k) - len(q), len(k), device=q.device)
        visible = visible_cells(positions, len(k), spec.window)
        keys, values = (x.transpose(0, 1).repeat_interleave(self._group, 0) for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, visible, scale=spec.attention_scale)
        return out.transpose(0, 1).flatten(1)

    def _put(self, values: torch.Tensor | np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values).to(self._backend.device)


def frozen(adapters: AdapterParameters) -> Adapters:
    """Trained adapters as engines take them."""
    return Adapters({layer: tuple(m.detach().half().cpu().numpy() for m in pair) for layer, pair in adapters.items()})


def mean_losses(
    student: Student, lessons: Sequence[Lesson], policy: DepthPolicy, adapters: AdapterParameters
) -> tuple[float, float]:
    """Mean KL of a policy over the tapered steps of the lessons, in nats, and its top-1 agreement there."""
    kl, agreement, steps = 0.0, 0.0, 0
    for first in range(0, len(lessons), TOGETHER):
        batch = lessons[first : first + TOGETHER]
        depths = [[policy.depth(step) for step in range(1, lesson.num_steps + 1)] for lesson in batch]
        with torch.no_grad():
            losses, agrees = student.losses(batch, depths, adapters)
        flat = torch.tensor([depth for own in depths for depth in own], device=losses.device)
        tapered = flat < policy.num_hidden_layers
        kl, agreement = kl + float(losses[tapered].sum()), agreement + float(agrees[tapered].sum())
        steps += int(tapered.sum())
    return kl / max(1, steps), agreement / max(1, steps)
