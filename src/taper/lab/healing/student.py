"""The tapered model with gradients for its adapters alone, and full depth's distribution as its target.

Nothing is computed twice: a `Lesson` keeps what full depth says of a completion, the keys and values of its prompt, and
the hidden states below the first layer that is ever skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...adapters import Adapters
from ...backends.torch import DTYPES, TorchBackend, adapt, capped, shares, visible_cells
from ...models.config import ModelConfig
from ...models.tensors import LoadedModel
from ...policy import DepthPolicy, active_prefixes
from ..calibration.replay import Reference

TOP = 256  # tokens of full depth's distribution that a target keeps; all others share one bucket
TOGETHER, MOST_TOGETHER = 512, 8192  # steps of lessons in one forward, or a few more; the latter if a GPU has room
_ROWS, _ROWS_ON_GPU = 16, 512  # whose probabilities are computed together: few fit into a processor's cache
_TINY = 1e-6  # least probability of the bucket, which rounding may leave empty

Cells = tuple[torch.Tensor, torch.Tensor]  # keys and values, each [n, heads, head_dim]
AdapterParameters = Mapping[int, tuple[torch.Tensor, torch.Tensor]]  # `down` and `up` by layer, f32


@dataclass(frozen=True)
class Lesson:
    """A completion that adapters learn from; T = its tokens after the first, which are predicted at tapered steps."""

    prompt_length: int
    token_ids: torch.Tensor  # int64 [T], what each step reads
    hidden_states: torch.Tensor  # f32 [T, hidden_size], what enters the first layer that may be skipped
    # By layer, keys and values [prompt, heads, head_dim], f16 or bf16; of layers below the first one that may be
    # skipped, those that later layers share, of prompt and steps.
    cache: dict[int, Cells]
    top_ids: torch.Tensor  # int64 [T, TOP], full depth's likeliest tokens, the argmax first
    top_logprobs: torch.Tensor  # f32 [T, TOP]

    @property
    def num_steps(self) -> int:
        """Tapered steps, T."""
        return len(self.top_ids)

    def on(self, device: torch.device) -> Lesson:
        """The same on a device."""
        arrays = {
            name: getattr(self, name).to(device) for name in ("token_ids", "hidden_states", "top_ids", "top_logprobs")
        }
        cache = {layer: (k.to(device), v.to(device)) for layer, (k, v) in self.cache.items()}
        return replace(self, cache=cache, **arrays)


class Student:
    """The frozen weights of a model, and the layers that `skip_order` may skip.

    `product_dtype` is f32, or bf16 for matrix products and attention; norms and hidden states are always f32.
    `together`: steps of lessons in one forward, so many that a GPU is busy and has room for them.
    """

    def __init__(
        self,
        model: LoadedModel,
        skip_order: Sequence[int],
        context_length: int,
        device: str,
        product_dtype: str = "f32",
    ) -> None:
        self._backend = TorchBackend(
            model.config,
            model.tensors,
            num_slots=1,
            context_length=context_length,
            dtype="f32",
            matrix_dtype=product_dtype,
            device=device,
        )
        self._product_dtype = DTYPES[product_dtype]
        self._products = partial(torch.autocast, device, torch.bfloat16, enabled=product_dtype == "bf16")
        self.config, self.skip_order, self.first_layer = model.config, tuple(skip_order), min(skip_order)
        self.together = TOGETHER if device == "cpu" else fitting_steps(model.config, torch.cuda.mem_get_info()[0])

    def lesson(self, reference: Reference) -> Lesson:
        """Run full depth once over a prompt and a completion of at least two tokens."""
        prompt, cache, hidden_states = len(reference.prompt_ids), {}, torch.empty(0)
        token_ids = [*reference.prompt_ids, *reference.completion_ids[:-1]]
        positions = torch.arange(len(token_ids), device=self._backend.device)
        kept = torch.float16 if self._product_dtype == torch.float32 else self._product_dtype
        with torch.no_grad(), self._products():
            rotations = self._backend.rotations(positions)
            given_ids = torch.tensor(token_ids, device=self._backend.device)
            x, given = self._backend.embed(given_ids).float(), self._backend.inputs_of_layers(given_ids)
            shared: dict[int, Cells] = {}
            for layer, spec in enumerate(self.config.layers):
                if layer == self.first_layer:
                    hidden_states = x[prompt:]
                h = self._attention_input(x, layer)
                if spec.cells_of is None:
                    k, v = self._backend.keys_values(h, layer, rotations)
                else:
                    k, v = shared[spec.cells_of]
                if layer in self.config.lenders:
                    shared[layer] = k, v
                if layer >= self.first_layer or layer in self.config.lenders:
                    end = prompt if layer >= self.first_layer else len(k)
                    cache[layer] = (k[:end].to(kept).cpu(), v[:end].to(kept).cpu())
                attended = self._attend(self._backend.queries(h, layer, rotations), k, v, layer)
                x = self._backend.finish_layer(x, attended, layer, given and given[layer])
            logits = self._backend.logits(x[prompt:]).float()
            top, ids = logits.topk(min(TOP, self.config.vocab_size), -1)
        logprobs = top - logits.logsumexp(-1, keepdim=True)
        return Lesson(prompt, given_ids[prompt:].cpu(), hidden_states.cpu(), cache, ids.cpu(), logprobs.cpu())

    def losses(
        self, lessons: Sequence[Lesson], depths: Sequence[Sequence[int]], adapters: AdapterParameters
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """KL(full || tapered) in nats at each step of the lessons, [steps], and whether the argmax is the same, bool.

        The steps of a lesson follow those of the lesson before it. All share every product; only their attention is
        apart. The depths of a lesson's steps never rise. Gradients flow to the adapters of skipped layers.
        """
        lessons = [lesson.on(self._backend.device) for lesson in lessons]
        rows = [lesson.hidden_states for lesson in lessons]
        layers, lenders = self.config.num_hidden_layers, self.config.lenders
        active = [active_prefixes(self.skip_order, layers, own) for own in depths]
        with self._products():
            given = self._backend.inputs_of_layers(torch.cat([lesson.token_ids for lesson in lessons]))
            shared = {
                layer: [self._cells_of(lesson, layer) for lesson in lessons]
                for layer in lenders
                if layer < self.first_layer
            }
            for layer in range(self.first_layer, layers):
                counts = [prefixes[layer] for prefixes in active]
                if layer in lenders:  # written for every step
                    shared[layer] = self._cells(rows, layer, lessons)
                own = given and torch.cat(
                    [x[:n] for x, n in zip(given[layer].split([len(x) for x in rows]), counts, strict=True)]
                )
                run = torch.cat([x[:n] for x, n in zip(rows, counts, strict=True)])
                skip = torch.cat([x[n:] for x, n in zip(rows, counts, strict=True)])
                if len(run):
                    run = self._run_layer(run, layer, lessons, counts, shared, own)
                if len(skip) and layer in adapters:
                    skip = adapt(skip, *adapters[layer])
                skipped = skip.split([len(x) - n for x, n in zip(rows, counts, strict=True)])
                rows = [torch.cat(parts) for parts in zip(run.split(counts), skipped, strict=True)]
            logits = self._backend.logits(torch.cat(rows))
        ids, logprobs = (
            torch.cat(parts)
            for parts in zip(*((lesson.top_ids, lesson.top_logprobs) for lesson in lessons), strict=True)
        )
        kl, agrees = _Divergence.apply(logits, ids, logprobs)
        return kl, agrees

    def _run_layer(
        self,
        x: torch.Tensor,
        layer: int,
        lessons: Sequence[Lesson],
        counts: Sequence[int],
        shared: Mapping[int, Sequence[Cells]],
        given: torch.Tensor | None,
    ) -> torch.Tensor:
        """A layer on rows x: the first `counts` steps of each lesson, one lesson after the other.

        `shared` has the keys and values of lenders, by lesson; `given` is what the layer gets besides, for each row.
        """
        source, rows = self.config.source(layer), x.split(list(counts))
        cells = shared[source] if source in shared else self._cells(rows, layer, lessons)
        rotations = self._backend.rotations(self._positions(rows, lessons))
        queries = self._backend.queries(self._attention_input(x, layer), layer, rotations).split(list(counts))
        attended = []
        for lesson, q, (k, v) in zip(lessons, queries, cells, strict=True):
            if len(q):
                end = lesson.prompt_length + len(q)
                attended.append(self._attend(q, k[:end], v[:end], layer))
        return self._backend.finish_layer(x, torch.cat(attended), layer, given)

    def _cells(self, rows: Sequence[torch.Tensor], layer: int, lessons: Sequence[Lesson]) -> list[Cells]:
        """A layer's keys and values of each prompt and of the first steps, whose hidden states are `rows`."""
        h, rotations = (
            self._attention_input(torch.cat(rows), layer),
            self._backend.rotations(self._positions(rows, lessons)),
        )
        projected = self._backend.keys_values(h, layer, rotations)
        cells = []
        for lesson, *own in zip(lessons, *(part.split([len(x) for x in rows]) for part in projected), strict=True):
            k, v = (
                torch.cat((past.to(x.dtype), x)) for past, x in zip(self._cells_of(lesson, layer), own, strict=True)
            )
            cells.append((k, v))
        return cells

    def _cells_of(self, lesson: Lesson, layer: int) -> Cells:
        keys, values = lesson.cache[layer]
        return keys.to(self._product_dtype), values.to(self._product_dtype)

    def _positions(self, rows: Sequence[torch.Tensor], lessons: Sequence[Lesson]) -> torch.Tensor:
        starts = [lesson.prompt_length for lesson in lessons]
        device = self._backend.device
        return torch.cat(
            [torch.arange(start, start + len(x), device=device) for start, x in zip(starts, rows, strict=True)]
        )

    def new_adapters(
        self, layers: Sequence[int], rank: int, seed: int, trained: Adapters | None = None
    ) -> AdapterParameters:
        """Adapters to train. Those not among the trained ones change nothing yet: `down` is random, `up` zero."""
        size, generator = self.config.hidden_size, torch.Generator().manual_seed(seed)
        adapters = {}
        for layer in layers:
            pair = torch.randn(rank, size, generator=generator) / size**0.5, torch.zeros(size, rank)
            if trained is not None and layer in trained.layers:
                pair = tuple(torch.from_numpy(matrix.astype(np.float32)) for matrix in trained.layers[layer])
            down, up = (matrix.to(self._backend.device).requires_grad_() for matrix in pair)
            adapters[layer] = (down, up)
        return adapters

    def _attention_input(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """What queries, keys and values of hidden states x [n, hidden_size] before a layer are made of."""
        return self._backend.attention_input(x, layer).to(self._product_dtype)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of the last tokens, q [n, heads, head_dim], over all: k, v [cells, key-value heads, head_dim]."""
        spec, group = self.config.layers[layer], q.shape[1] // k.shape[1]
        positions = torch.arange(len(k) - len(q), len(k), device=q.device)
        visible = visible_cells(positions, len(k), spec.window)
        # On a CPU, faster with gradients than PyTorch's own attention, most of all in bf16. The heads of a group share
        # keys and values, so their queries are the rows of one product: [key-value heads, group * n, head_dim].
        mask = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, -torch.inf).repeat(group, 1)
        queries = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
        if spec.score_cap is None:
            scores = torch.baddbmm(mask, queries, k.permute(1, 2, 0), alpha=spec.attention_scale)
        else:
            scores = capped(spec.attention_scale * torch.bmm(queries, k.permute(1, 2, 0)), spec.score_cap) + mask
        if (sinks := self._backend.sinks(layer)) is not None:
            sinks = sinks.view(-1, group).repeat_interleave(len(q), 1)[..., None]
        out = torch.bmm(shares(scores, sinks), v.transpose(0, 1))
        return out.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1)


class _Divergence(torch.autograd.Function):  # type: ignore[misc]  # PyTorch does not type it
    """KL(full || tapered) of each row, and whether the argmax is the same.

    Works on a few rows at a time, and on their gradient at once, since new memory for all logits takes longer than
    the arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, vocab_size] of the tapered model; full depth's likeliest tokens and their log-probabilities."""
        kl, agrees, ctx.gradient = [], [], torch.empty_like(logits)
        at_once = _ROWS if logits.device.type == "cpu" else _ROWS_ON_GPU
        parts = (x.split(at_once) for x in (logits, top_ids, top_logprobs, ctx.gradient))
        for row, ids, log_p, gradient in zip(*parts, strict=True):
            x = row.to(torch.float32, copy=True)
            highest, likeliest = x.max(-1, keepdim=True)
            log_q = x.gather(-1, ids) - highest
            total = x.sub_(highest).exp_().sum(-1, keepdim=True)
            p, log_q = log_p.exp(), log_q - total.log()
            p_rest, q_rest = ((1 - y.exp().sum(-1, keepdim=True)).clamp_min(_TINY) for y in (log_p, log_q))
            kl.append((p * (log_p - log_q)).sum(-1) + (p_rest * (p_rest / q_rest).log())[:, 0])
            agrees.append(likeliest[:, 0] == ids[:, 0])
            # With respect to logits: q - p of likely tokens, q (1 - p_rest / q_rest) of those that share the bucket.
            gradient.copy_(x.mul_((1 - p_rest / q_rest) / total).scatter_(-1, ids, log_q.exp() - p))
        agreement = torch.cat(agrees)
        ctx.mark_non_differentiable(agreement)
        return torch.cat(kl), agreement

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(grads[0].unsqueeze(-1).to(gradient.dtype)), None, None


def frozen(adapters: AdapterParameters) -> Adapters:
    """Trained adapters as engines take them."""
    return Adapters({layer: tuple(m.detach().half().cpu().numpy() for m in pair) for layer, pair in adapters.items()})


def mean_losses(
    student: Student, lessons: Sequence[Lesson], policy: DepthPolicy, adapters: AdapterParameters
) -> tuple[float, float]:
    """Mean KL of a policy over the tapered steps of the lessons, in nats, and its top-1 agreement there."""
    kl, agreement, steps = 0.0, 0.0, 0
    for batch in _batches(lessons, student.together):
        depths = [[policy.depth(step) for step in range(1, lesson.num_steps + 1)] for lesson in batch]
        with torch.no_grad():
            losses, agrees = student.losses(batch, depths, adapters)
        flat = torch.tensor([depth for own in depths for depth in own], device=losses.device)
        tapered = flat < policy.num_hidden_layers
        kl, agreement = kl + float(losses[tapered].sum()), agreement + float(agrees[tapered].sum())
        steps += int(tapered.sum())
    return kl / max(1, steps), agreement / max(1, steps)


def fitting_steps(config: ModelConfig, free: int) -> int:
    """Steps of lessons whose activations and logits, with gradients, take half of the bytes that are free on a GPU."""
    of_layers = config.num_hidden_layers * (4 * config.intermediate_size + 12 * config.hidden_width) * 4
    return max(TOGETHER, min(MOST_TOGETHER, free // 2 // (of_layers + 8 * config.vocab_size)))


def _batches(lessons: Sequence[Lesson], together: int) -> Iterator[list[Lesson]]:
    """All lessons in turn, in batches of about so many steps."""
    batch: list[Lesson] = []
    for lesson in lessons:
        batch.append(lesson)
        if sum(one.num_steps for one in batch) >= together:
            yield batch
            batch = []
    if batch:
        yield batch
