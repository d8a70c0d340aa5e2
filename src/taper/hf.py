"""Depth decay inside Hugging Face transformers, on its own layers and its own decoding loop.

    model.generate(**inputs, custom_generate=taper.hf.custom_generate(policy))

The reference implementation: eager, and written to be obviously right. It shares `policy.py` and `errors.py` with the
engine, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationMode

from .adapters import EPS
from .errors import REUSE, PolicyError, RequestError, limited_attention, one_of, whole_number
from .policy import DepthPolicy

_RECURRENT = {"linear_attention", "conv"}  # among the types of layers in a config
_CHUNKED = "chunked_attention"  # there, masks limit layers that keep all tokens, as they do those with windows


def custom_generate(
    policy: DepthPolicy, reuse: str = REUSE[0], exact: bool = False, max_drafted: int = 4
) -> Callable[..., Any]:
    """The argument of this name for `model.generate`: greedy or sampled decoding under a policy.

    Token i of every row runs `policy.retained_layers(i)`; the prompt runs all layers. Streamers, logits processors,
    stopping criteria and left-padded batches work as usual, and `generate` returns what it always does.

    Args:
        policy: the depth of each step, and the layers to skip.
        reuse: what a cache that the caller passed in holds afterwards. "filled": every token of prompt and completion;
            where a layer was skipped, its keys and values are projections of the hidden state that passed it by.
            "exact": only the tokens that every layer ran; it is cut back to these.
        exact: the policy only drafts, `max_drafted` tokens at a time, and every token is full depth's, as with plain
            `generate`; of one row, without `return_dict_in_generate`.
        max_drafted: at least 1.

    Raises:
        RequestError: `reuse` is neither of these, or `max_drafted` is below 1.

    Raises (from `generate`):
        RequestError: attention that is neither full nor in a window or in chunks, beams, assistants, a static cache
            or none, one that has dropped tokens, `inputs_embeds`, recurrent layers with `exact` or `reuse="exact"`,
            adapters where a token has several hidden states; `stop_strings`, whose tokenizer transformers loses on the
            way: `StopStringCriteria` among the `stopping_criteria` does what they would.
        PolicyError: the policy was made for another model, or skips the layer from which transformers reads
            lengths, the first with attention.
    """
    one_of("reuse", reuse, REUSE)
    whole_number("max_drafted", max_drafted, 1)

    def generate(
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        stop_strings: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        if stop_strings is not None:
            raise RequestError(
                "transformers passes no tokenizer on to a custom_generate, which stop_strings need",
                "give stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)]) instead",
            )
        # transformers hands these two to its own loops only; its frame is the one place to find them.
        caller = sys._getframe(1).f_locals
        cache: Any = model_kwargs.get("past_key_values")
        keeps_all = reuse == "filled" and not exact
        _check(model, policy, generation_config, caller.get("assistant_model"), cache, model_kwargs, keeps_all)
        # Layers that keep only a window count wrongly once they are skipped; masks limit layers that keep all tokens.
        cache.layers = [
            DynamicLayer() if isinstance(layer, DynamicSlidingWindowLayer) else layer for layer in cache.layers
        ]
        if exact:
            mask = model_kwargs.get("attention_mask")
            is_padded = mask is not None and not bool(mask.all())
            if len(input_ids) != 1 or is_padded or generation_config.return_dict_in_generate:
                raise RequestError("exact takes one row without padding, and returns ids", "give one prompt at a time")
            choose = _chooser(logits_processor, generation_config.do_sample)
            streamer = caller.get("streamer")
            return _exact(model, policy, input_ids, cache, choose, stopping_criteria, streamer, max_drafted)
        try:
            with _layers_by_step(model, policy, reuse == "filled", input_ids.shape[1]):
                return model._sample(
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    generation_config=generation_config,
                    streamer=caller.get("streamer"),
                    **model_kwargs,
                )
        finally:
            _cut(cache, min((layer.get_seq_length() for layer in _own(cache)), default=0))

    return generate


def _cut(cache: Any, length: int) -> None:
    """Keep the first `length` tokens of each layer."""
    for layer in _own(cache):
        if (extra := layer.get_seq_length() - length) > 0:
            layer.crop(-extra)


def _own(cache: Any) -> list[Any]:
    """The layers of a cache that hold keys and values; others read those."""
    return [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]


Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids [1, n], logits [1, V]: the next token [1, 1]


def _chooser(logits_processor: Any, samples: bool) -> Choose:
    """How `generate` chooses a token."""

    def choose(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        scores = logits_processor(ids, logits.float())
        return torch.multinomial(scores.softmax(-1), 1) if samples else scores.argmax(-1, keepdim=True)

    return choose


def _exact(
    model: Any,
    policy: DepthPolicy,
    ids: torch.Tensor,
    cache: Any,
    choose: Choose,
    stopping_criteria: Any,
    streamer: Any,
    max_drafted: int,
) -> torch.Tensor:
    """Full depth's tokens [1, n]: those that the policy drafted as far as full depth chooses the same."""

    def logits_of(new_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=new_ids, past_key_values=cache, use_cache=True).logits[0]

    prompt_length, drafted = ids.shape[1], ids[:, :0]
    logits = logits_of(ids[:, cache.get_seq_length() :])[-1:]
    while True:
        for place in range(len(logits)):  # of the last token, and of each drafted one
            token = choose(ids, logits[place : place + 1])
            ids = torch.cat([ids, token], -1)
            if streamer is not None:
                streamer.put(token.cpu()[0])
            if stopping_criteria(ids, None).all():
                if streamer is not None:
                    streamer.end()
                return ids
            if place >= drafted.shape[1] or token.item() != drafted[0, place].item():
                break
        _cut(cache, ids.shape[1] - 1)  # without what was rejected
        drafted = ids[:, :0]
        with _layers_by_step(model, policy, False, prompt_length):
            for _ in range(max_drafted):
                last = drafted[:, -1:] if drafted.numel() else ids[:, -1:]
                drafted = torch.cat([drafted, logits_of(last)[-1:].argmax(-1, keepdim=True)], -1)
        _cut(cache, ids.shape[1] - 1)  # full depth writes these again
        logits = logits_of(torch.cat([ids[:, -1:], drafted], -1))


@contextmanager
def _layers_by_step(model: Any, policy: DepthPolicy, fill: bool, prompt_length: int) -> Iterator[None]:
    """Let each flex layer pass its input on at the steps that skip it; restored whatever happens."""
    decoder, counter = model.get_decoder(), _first_attention(model.config.get_text_config())
    layers = decoder.layers if hasattr(decoder, "layers") else decoder.model.layers  # Llama 4's is the whole model
    own = {index: layers[index].__dict__.get("forward") for index in policy.skip_order}
    try:
        for index in policy.skip_order:
            counted = index > counter
            layers[index].forward = _forward_by_step(layers[index], index, policy, fill, prompt_length, counted)
        yield
    finally:
        for index, forward in own.items():
            if forward is None:
                layers[index].__dict__.pop("forward", None)
            else:
                layers[index].forward = forward


def _first_attention(config: Any) -> int:
    """The layer by whose keys a cache counts its tokens."""
    kinds = getattr(config, "layer_types", None) or []
    return next((layer for layer, kind in enumerate(kinds) if kind not in _RECURRENT), 0)


def _forward_by_step(
    layer: Any, index: int, policy: DepthPolicy, fill: bool, prompt_length: int, counted: bool
) -> Callable[..., Any]:
    """The forward of a flex layer. `counted`: the layer by which the cache counts has run before it."""
    adapter, run = _adapter(policy, index), layer.forward
    # A recurrent layer that a token skips keeps its state as it is.
    has_cells = getattr(layer, "self_attn", None) is not None
    lends = getattr(getattr(layer, "self_attn", None), "store_full_length_kv", False)  # to layers that share them

    def forward(hidden_states: Any, *args: Any, past_key_values: Any, **kwargs: Any) -> Any:
        # With the tokens of this forward, the cache holds the prompt and one token for each step. Hidden states are
        # [rows, tokens, size], or [streams, rows, tokens, size].
        step = past_key_values.get_seq_length() + (0 if counted else hidden_states.shape[-2]) - prompt_length
        if step > 0 and index not in policy.retained_layers(step):
            if lends:
                run(hidden_states, *args, past_key_values=past_key_values, **kwargs)
            elif fill and has_cells:
                with suppress(_Written):
                    run(hidden_states, *args, past_key_values=_WriteOnly(past_key_values), **kwargs)
            return hidden_states if adapter is None else adapter(hidden_states)
        return run(hidden_states, *args, past_key_values=past_key_values, **kwargs)

    return forward


class _Written(Exception):
    """A layer has written its keys and values."""


class _WriteOnly:
    """A cache that ends a layer once it has written its keys and values: the layer's own code computes them."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._cache.update(*args, **kwargs)
        raise _Written


def _adapter(policy: DepthPolicy, index: int) -> Callable[[Any], Any] | None:
    """The stand-in of a layer, as `Adapters` defines it."""
    if policy.adapters is None or index not in policy.adapters.layers:
        return None
    down, up = map(torch.from_numpy, policy.adapters.layers[index])

    def adapter(x: Any) -> Any:
        normed = F.rms_norm(x, (x.shape[-1],), eps=EPS)
        return x + F.linear(F.silu(F.linear(normed, down.to(x))), up.to(x))

    return adapter


def _check(
    model: Any,
    policy: DepthPolicy,
    generation_config: Any,
    assistant: Any,
    cache: Any,
    model_kwargs: dict[str, Any],
    keeps_all: bool,
) -> None:
    """Refuse what would go wrong; `keeps_all` says that the cache is never cut back."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or []), "full_attention"}
    is_recurrent, kinds = bool(kinds & _RECURRENT), kinds - {*_RECURRENT, _CHUNKED}
    windowed = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, DynamicSlidingWindowLayer)]
    dropped = any(layer.get_seq_length() for layer in windowed)
    has_streams = getattr(config, "altup_num_inputs", 1) > 1
    mode = generation_config.get_generation_mode(assistant)
    for wrong, reason in [
        (model.config.is_encoder_decoder, "the model has an encoder"),
        (limited_attention(SimpleNamespace(layer_types=kinds)) == "hybrid", "the model has hybrid attention"),
        (is_recurrent and not keeps_all, "the states of recurrent layers cannot be cut back"),
        (has_streams and policy.adapters is not None, "adapters are for models with one hidden state a token"),
        (mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE), f"{mode.value} is not greedy or sampling"),
        (not generation_config.use_cache, "use_cache is off"),
        (dropped, "the cache has dropped what is outside a window"),
        (not isinstance(cache, DynamicCache), f"the cache is a {type(cache).__name__}, not a DynamicCache"),
        (model_kwargs.get("inputs_embeds") is not None, "the prompt is inputs_embeds, not input_ids"),
    ]:
        if wrong:
            raise RequestError(
                f"depth decay would not be exact here: {reason}", "call generate without custom_generate"
            )
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    policy.check_model(config.num_hidden_layers, policy.model and replace(policy.model, **sizes))
    counter = _first_attention(config)
    if counter not in policy.retained_at(policy.min_depth) and not (is_recurrent and keeps_all):
        message = f"the policy skips layer {counter}; transformers reads positions from its cache"
        raise PolicyError(message, f"keep layer {counter} core")
