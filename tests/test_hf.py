"""The transformers integration: everything `generate` offers keeps working, and what would not be exact is refused."""

from __future__ import annotations

import pytest
import torch
from tiny import LATENT, LLAMA4, MISTRAL4, make_tiny, policies, random_prompt, reference_ids
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import taper.hf
from taper.errors import PolicyError, RequestError
from taper.policy import DepthPolicy, ModelIdentity, Schedule

pytestmark = pytest.mark.ci

POLICY = policies(6)["d3"]
CHUNKS = LLAMA4 | {"attention_chunk_size": 8, "floor_scale": 8, "attn_scale": 1.0}


def generate(model, prompts, policy=POLICY, tokens=20, **options):
    ids = torch.tensor(prompts)
    greedy = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens}
    return model.generate(ids, **{"custom_generate": taper.hf.custom_generate(policy)} | greedy | options)


def naive(model, prompt: list[int], policy: DepthPolicy, tokens: int) -> list[int]:
    """The root of trust: the policy once more without any cache, each layer on the tokens that run it.

    Everything else is compared with the reference implementation, and that with this. A token that skips a layer passes
    on its hidden state; later tokens never run that layer, by nesting.
    """
    inner, ids = model.model, list(prompt)
    for _ in range(tokens):
        depths = [policy.num_hidden_layers] * len(prompt)
        depths += [policy.depth(step) for step in range(1, len(ids) - len(prompt) + 1)]
        x = inner.embed_tokens(torch.tensor([ids]))
        places = torch.arange(len(ids))[None]
        embeddings = inner.rotary_emb(x, position_ids=places)
        for index, layer in enumerate(inner.layers):
            n = sum(index in policy.retained_at(depth) for depth in depths)
            mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
            if window := getattr(model.config, "sliding_window", None):
                mask += torch.full((1, 1, n, n), -torch.inf).tril(-window)
            if getattr(model.config, "layer_types", [])[index : index + 1] == ["chunked_attention"]:
                chunk = torch.arange(n) // model.config.attention_chunk_size
                mask[..., chunk[:, None] != chunk] = -torch.inf
            rotation = embeddings[:, :n] if torch.is_tensor(embeddings) else tuple(e[:, :n] for e in embeddings)
            ran = layer(x[:, :n], attention_mask=mask, position_ids=places[:, :n], position_embeddings=rotation)
            x = torch.cat([ran, x[:, n:]], 1)
        ids.append(int(model.lm_head(inner.norm(x[:, -1])).argmax()))
    return ids[len(prompt) :]


@pytest.mark.ci
@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 8}),
        ("llama4", CHUNKS),
        ("mistral4", LATENT | MISTRAL4),
    ],
)
def test_equals_a_loop_without_any_cache(tmp_path, architecture, options):
    tiny, prompt = make_tiny(tmp_path, architecture, layers=6, **options), random_prompt(20)
    for policy in policies(6).values():
        assert reference_ids(tiny, prompt, policy, 24) == naive(tiny.hf, prompt, policy, 24)


def test_a_cache_that_has_dropped_tokens_is_refused(tmp_path):
    model = make_tiny(tmp_path, "mistral", layers=6, sliding_window=8).hf
    cache = DynamicCache(config=model.config)
    model(torch.tensor([random_prompt(31)]), past_key_values=cache)
    with pytest.raises(RequestError, match="dropped"):
        generate(model, [random_prompt(31)], past_key_values=cache)


def test_left_padded_batches_equal_each_row_alone(tiny_llama):
    short, long = random_prompt(21, 9), random_prompt(22, 30)
    padding = len(long) - len(short)
    mask = torch.tensor([[0] * padding + [1] * len(short), [1] * len(long)])
    out = generate(tiny_llama.hf, [[0] * padding + short, long], attention_mask=mask)
    for row, prompt in zip(out[:, len(long) :].tolist(), (short, long), strict=True):
        assert row == generate(tiny_llama.hf, [prompt])[0, len(prompt) :].tolist()


def test_streamers_receive_every_token(tiny_llama):
    class Streamer:
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, value):
            self.got += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Streamer()
    out = generate(tiny_llama.hf, [random_prompt(23)], streamer=streamer)
    assert streamer.got == out[0].tolist()
    assert streamer.ended


def test_logits_processors_and_stopping_criteria_apply(tiny_llama):
    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, 10:] = -torch.inf
            return scores

    prompt = random_prompt(24)
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(prompt) + 7)])
    out = generate(tiny_llama.hf, [prompt], logits_processor=LogitsProcessorList([Only()]), stopping_criteria=criteria)[
        0, len(prompt) :
    ]
    assert len(out) == 7
    assert out.max() < 10


def test_sampling_is_repeatable_and_returns_dictionaries(tiny_llama):
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        out = generate(
            tiny_llama.hf, [random_prompt(25)], do_sample=True, return_dict_in_generate=True, output_scores=True
        )
        results.append(out.sequences[0].tolist())
        assert len(out.scores) == 20
    assert results[0] == results[1]


def test_a_cache_passed_in_is_cut_to_what_is_exact_where_that_is_asked_for(tiny_llama):
    first, cache, exact = random_prompt(26), DynamicCache(), taper.hf.custom_generate(POLICY, reuse="exact")
    said = generate(tiny_llama.hf, [first], past_key_values=cache, custom_generate=exact)[0].tolist()
    assert {layer.get_seq_length() for layer in cache.layers} == {len(first)}
    second = [said + random_prompt(27, 5)]
    again = generate(tiny_llama.hf, second, past_key_values=cache, custom_generate=exact)
    assert torch.equal(again, generate(tiny_llama.hf, second))


def test_layers_are_restored_whatever_happens(tiny_llama):
    class Breaks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate(tiny_llama.hf, [random_prompt(28)], logits_processor=LogitsProcessorList([Breaks()]))
    assert all("forward" not in layer.__dict__ for layer in tiny_llama.hf.model.layers)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
    ],
)
def test_modes_that_would_not_be_exact_are_refused(tiny_llama, options, says):
    with pytest.raises(RequestError, match=says):
        generate(tiny_llama.hf, [random_prompt(29)], **options)


def test_assistants_are_refused(tiny_llama):
    with pytest.raises(RequestError, match="assisted"):
        generate(tiny_llama.hf, [random_prompt(29)], assistant_model=tiny_llama.hf)


def test_attention_of_another_kind_is_refused(tmp_path):
    model = make_tiny(tmp_path, layers=6).hf
    model.config.layer_types = ["full_attention"] * 5 + ["indexed_attention"]
    with pytest.raises(RequestError, match="hybrid"):
        generate(model, [random_prompt(30)])


def test_policies_that_do_not_fit_are_refused(tiny_llama):
    other = ModelIdentity("llama", 65, 300, "F32")
    for policy in (
        DepthPolicy.early_exit(7, 5),
        DepthPolicy.static(6, 5, [0]),
        DepthPolicy(Schedule(6, "constant", 5), (3,), model=other),
    ):
        with pytest.raises(PolicyError):
            generate(tiny_llama.hf, [random_prompt(30)], policy)


@pytest.mark.parametrize(
    ("sampling", "max_drafted"),
    [
        ({}, 4),
        pytest.param({}, 1, marks=pytest.mark.ci),
        pytest.param({"do_sample": True, "temperature": 0.9, "top_k": 20}, 7, marks=pytest.mark.ci),
    ],
)
def test_exact_gives_the_tokens_of_plain_generate(tiny, sampling, max_drafted):
    policy, prompt = DepthPolicy.d3(5, 0.9, skip_order=[3, 1, 2]), [random_prompt(31)]
    exact = taper.hf.custom_generate(policy, exact=True, max_drafted=max_drafted)
    outputs = []
    for custom in ({}, {"custom_generate": exact}):
        torch.manual_seed(7)
        options = {"do_sample": False, "max_new_tokens": 30} | sampling | custom
        outputs.append(tiny.hf.generate(torch.tensor(prompt), attention_mask=torch.ones(1, 23), **options).tolist())
    assert outputs[0] == outputs[1]


@pytest.mark.ci
def test_exact_counts_positions_where_layers_were_skipped(tmp_path):
    """In Llama 4, a layer without positions sharpens attention by the length of its own cache."""
    model, prompt = make_tiny(tmp_path, "llama4", layers=6, **CHUNKS).hf, random_prompt(32)
    for policy in policies(6).values():
        exact = taper.hf.custom_generate(policy, exact=True)
        assert torch.equal(
            generate(model, [prompt], custom_generate=exact), generate(model, [prompt], custom_generate=None)
        )


def test_exact_takes_one_row(tiny_llama):
    exact = taper.hf.custom_generate(POLICY, exact=True)
    with pytest.raises(RequestError, match="one row"):
        generate(tiny_llama.hf, [random_prompt(1), random_prompt(2)], custom_generate=exact)
    with pytest.raises(RequestError, match="max_drafted"):
        taper.hf.custom_generate(POLICY, exact=True, max_drafted=0)
