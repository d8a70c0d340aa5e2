"""Prompts that come back before their completions, with the log-probabilities of their tokens."""

from __future__ import annotations

import numpy as np
import torch
from serving import NAME, serving

from taper import LLM, SamplingParams
from taper.engine import MAX_PROMPT_LOGITS, Request


def test_an_echo_begins_with_the_prompt_and_its_log_probabilities(tiny_llama):
    with serving(tiny_llama) as server:
        prompt = "one two three, " * 12  # of several chunks
        ids = server.llm.encode(prompt, raw=True)
        assert len(ids) > 2 * MAX_PROMPT_LOGITS
        policy = {"taper": {"ignore_eos": True, "mode": "full"}}
        body = {"model": NAME, "max_tokens": 2, "temperature": 0, "logprobs": 2, "echo": True} | policy
        wanted = transformers_logprobs(tiny_llama, ids)
        plain = server.http.post("/v1/completions", json=body | {"prompt": prompt, "echo": False}).json()["choices"][0]
        for given in (prompt, ids, [prompt, prompt]):
            choice = server.http.post("/v1/completions", json=body | {"prompt": given}).json()["choices"][-1]
            scores = choice["logprobs"]
            assert choice["text"] == prompt + plain["text"]
            assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
            assert np.allclose(scores["token_logprobs"][1 : len(ids)], wanted, atol=1e-4)
            assert all(len(top) == 2 for top in scores["top_logprobs"][1:])
            assert np.allclose(scores["token_logprobs"][len(ids) :], plain["logprobs"]["token_logprobs"], atol=1e-4)
            assert len({len(values) for values in scores.values()}) == 1
            for token, offset in list(zip(scores["tokens"], scores["text_offset"], strict=True))[: len(ids) + 1]:
                assert choice["text"][offset:].startswith(token) or token.startswith("bytes:")
        empty = server.http.post("/v1/completions", json=body | {"prompt": prompt, "max_tokens": 0}).json()
        assert (empty["choices"][0]["text"], empty["usage"]["completion_tokens"]) == (prompt, 0)
        assert np.allclose(empty["choices"][0]["logprobs"]["token_logprobs"][1:], wanted, atol=1e-4)
        silent = server.http.post("/v1/completions", json=body | {"prompt": prompt, "logprobs": None}).json()
        assert silent["choices"][0]["text"] == prompt + plain["text"]
        nothing = {"model": NAME, "prompt": "hi", "max_tokens": 0}
        reply = server.http.post("/v1/completions", json=nothing).json()
        assert (reply["choices"][0]["text"], reply["usage"]["completion_tokens"]) == ("", 0)
        for wrong in ({"stream": True}, {"suffix": "x"}, {"taper": {"mode": "compare"}}):
            refused = server.http.post("/v1/completions", json=body | {"prompt": "hi"} | wrong)
            assert refused.status_code == 400


def transformers_logprobs(tiny_llama, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = tiny_llama.hf(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].numpy()


def test_log_probabilities_of_prompts_do_not_disturb_other_sequences(tiny_llama):
    with LLM(str(tiny_llama.folder), dtype="f32", threads=1, context=300, max_batch_size=3) as llm:
        full, params = llm.resolve_policy(mode="full"), SamplingParams(max_tokens=6, ignore_eos=True)
        prompts = [llm.encode("one two three, " * 12, raw=True), llm.encode("four", raw=True)]
        alone = [llm.engine.complete([Request(ids, params, full)])[0] for ids in prompts]
        scored = [Request(prompts[0], params, full, prompt_logprobs=0), Request(prompts[1], params, full)]
        for requests in (scored, [*scored, scored[0]]):
            assert llm.engine.complete(requests)[:2] == alone
