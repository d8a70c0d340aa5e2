"""The server's replies: OpenAI's fields do what they say, streamed and not, and depths are reported."""

from __future__ import annotations

import codecs
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from click.testing import CliRunner
from serving import NAME, TOOLS_TEMPLATE, chat_body, serving
from tiny import policies

from taper import LLM
from taper.engine.drafting import Drafting
from taper.server.tool_calls import ToolCallParser, join_calls

pytestmark = pytest.mark.device


def events(response) -> list[dict]:
    """The events of a stream, [DONE] left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, end = [part for part in response.text.split("\n\n") if part]
    assert end == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.fixture(scope="module")
def other_llm(server):
    """The same model on an engine that nobody else uses."""
    return LLM(server.llm.model, dtype="f32", threads=1, context=256, max_batch_size=1)


def reference_ids(server, prompt, policy="d3", raw=False, llm=None, **options):
    params = server.llm.sampling_params(**{"max_tokens": 8, "ignore_eos": True, "temperature": 0, **options})
    return (llm or server.llm).generate(prompt, params, policy=server.served.policies[policy], raw=raw)


def test_a_chat_completion_has_the_models_text_and_its_depths(server):
    reply = server.chat("one").json()
    expected = reference_ids(server, "one")
    (choice,) = reply["choices"]
    assert (reply["object"], reply["model"], choice["index"]) == ("chat.completion", NAME, 0)
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    taper = choice["taper"]
    assert taper["depths"] == expected.depths == [policies(6)["d3"].depth(step) for step in range(8)]
    assert (taper["mean_depth"], taper["num_hidden_layers"]) == (expected.mean_depth, 6)
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (expected.prompt_tokens, 8)
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 0.9, "seed": 4},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["a", "e"]},
        {"taper": {"ignore_eos": False, "policy": "static"}, "max_tokens": 60},
    ],
)
def test_a_stream_adds_up_to_the_json_reply(server, fields):
    whole = server.chat("two", **fields).json()
    stream = events(server.chat("two", **fields, stream=True, stream_options={"include_usage": True}))
    *chunks, last = stream
    assert last["choices"] == []
    assert [chunk.get("usage", "missing") for chunk in chunks] == [None] * len(chunks)  # as OpenAI documents
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert [part["taper"]["depth"] for part in parts if "depth" in part["taper"]] == choice["taper"]["depths"]
        logprobs = [token for part in parts for token in (part.get("logprobs") or {"content": []})["content"]]
        assert logprobs == ((choice["logprobs"] or {}).get("content") or [])
    assert len({chunk["id"] for chunk in stream}) == 1


def test_a_stop_string_ends_the_text_before_it(server):
    text = reference_ids(server, "three").text
    reply = server.chat("three", stop=text[3:5]).json()["choices"][0]
    assert (reply["message"]["content"], reply["finish_reason"]) == (text[: text.find(text[3:5])], "stop")


def test_choices_differ_and_a_seed_repeats_them(server):
    def texts(seed):
        reply = server.chat("four", n=4, temperature=1.0, seed=seed).json()
        return [choice["message"]["content"] for choice in reply["choices"]]

    assert len(set(texts(1))) == 4
    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_a_comparison_gives_what_both_modes_give_alone_a_token_in_turn(server):
    fields = {"max_tokens": 30, "temperature": 0.9, "seed": 4, "taper": {"ignore_eos": True}}
    alone = [server.chat("three", **fields | {"taper": own}).json() for own in ({"mode": "full"}, {"policy": "d3"})]
    own = {"mode": "compare", "policy": "d3"}
    whole = server.chat("three", **fields | {"taper": own}).json()
    assert [choice["message"] for choice in whole["choices"]] == [reply["choices"][0]["message"] for reply in alone]
    assert whole["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    policies = [choice["taper"]["policy"] for choice in whole["choices"]]
    assert policies == [reply["choices"][0]["taper"]["policy"] for reply in alone]
    parts = [chunk["choices"][0] for chunk in events(server.chat("three", **fields | {"taper": own}, stream=True))]
    for count in range(1, 30):
        behind, ahead = sorted(sum(part["index"] == side for part in parts[:count]) for side in (0, 1))
        assert ahead - behind <= 1
    for side in (0, 1):
        seconds = [part["taper"]["seconds"] for part in parts if part["index"] == side and "seconds" in part["taper"]]
        assert seconds == sorted(seconds)
    seedless = server.chat("three", temperature=2.0, max_tokens=1, taper=own).json()["choices"]
    assert seedless[0]["message"] == seedless[1]["message"]  # the first token has full depth, and they share a seed


def test_what_a_comparison_does_not_go_with_is_refused(server):
    for field, value, param in (("n", 2, "n"), ("taper", {"mode": "compare", "policy": "full"}, "taper.policy")):
        response = server.chat("hi", **{"taper": {"mode": "compare"}, field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}, {"stream": True}])
def test_exact_mode_gives_what_full_depth_gives(server, fields):
    fields = {"max_tokens": 40, "temperature": 0} | fields
    full, exact = (
        server.chat("abcabcabcabc", **fields | {"taper": {"ignore_eos": True, "mode": mode}})
        for mode in ("full", "exact")
    )
    if "stream" in fields:
        ends = [events(reply)[-1]["choices"][0]["taper"] for reply in (full, exact)]
    else:
        ends = [reply.json()["choices"][0] for reply in (full, exact)]
        assert ends[0]["message"] == ends[1]["message"]
        ends = [choice["taper"] for choice in ends]
    assert ends[0]["depths"] == ends[1]["depths"]
    assert ends[0]["drafted_tokens"] == 0
    assert ends[1]["accepted_tokens"] <= ends[1]["drafted_tokens"]


def test_metrics_count_drafts_by_their_place(server, monkeypatch):
    drafting = Drafting("ngram", max_tokens=3, min_match=1, always=True)
    monkeypatch.setattr(server.served, "_drafting", lambda fields: drafting)
    names = ["taper_drafted_tokens_total", "taper_accepted_tokens_total", "taper_verify_seconds"]
    places = [f'taper_{kind}_by_place{{place="{n}"}}' for n in (1, 2, 3) for kind in ("verified", "accepted")]
    before = [server.metric(name) for name in (*names, *places)]
    reply = server.chat("abcabcabcabc", max_tokens=60, temperature=0, taper={"ignore_eos": True}).json()
    grown = [server.metric(name) - value for name, value in zip((*names, *places), before, strict=True)]
    stats = reply["choices"][0]["taper"]
    assert grown[:2] == [stats["drafted_tokens"], stats["accepted_tokens"]]
    assert grown[2] > 0
    assert sum(grown[3::2]) == stats["drafted_tokens"] > 0
    assert sum(grown[4::2]) == stats["accepted_tokens"]
    assert all(accepted <= verified for verified, accepted in zip(grown[3::2], grown[4::2], strict=True))


def test_drafts_are_asked_for_by_name_and_do_not_go_with_a_comparison(server):
    tapered = {"ignore_eos": True, "policy": "d3"}
    outputs = [
        server.chat("abcabc", max_tokens=30, temperature=0, taper=tapered | more).json()["choices"][0]["message"]
        for more in ({}, {"draft": "ngram"}, {"draft": "off"})
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    for taper, param in (({"mode": "compare", "policy": "d3", "draft": "ngram"}, "draft"), ({"draft": "x"}, "draft")):
        response = server.chat("hi", taper=taper)
        assert (response.status_code, response.json()["error"]["param"]) == (400, f"taper.{param}")
    response = server.chat("hi", taper={"mode": "exact", "policy": "full"})
    assert response.status_code == 400
    assert "cannot draft" in response.json()["error"]["message"]


def test_the_time_of_each_side_of_a_comparison_is_its_own(server):
    """Both sides together take the time that passed, and so much less than twice of it."""
    fields = {"max_tokens": 40, "temperature": 0, "taper": {"mode": "compare", "policy": "d3", "ignore_eos": True}}
    began = time.perf_counter()
    full, tapered = server.chat("three", **fields).json()["choices"]
    passed = time.perf_counter() - began
    sides = [39 / side["taper"]["tokens_per_second"] for side in (full, tapered)]
    assert sum(sides) < passed


def test_prompts_of_one_request_are_counted_once_and_computed_once(server):
    before = server.metric("taper_cached_prompt_tokens_total")
    usage = server.chat("a long enough prompt to be shared", n=4).json()["usage"]
    assert usage["prompt_tokens"] == len(server.llm.encode("a long enough prompt to be shared"))
    assert usage["completion_tokens"] == 32
    assert server.metric("taper_cached_prompt_tokens_total") - before >= 3 * (usage["prompt_tokens"] - 1)


def test_a_later_turn_reuses_the_earlier_ones(server):
    messages = [{"role": "user", "content": "a first turn that is long enough to matter"}]
    reply = server.chat(messages=messages, taper={"mode": "full"}).json()["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": "go on"}]
    usage = server.chat(messages=messages).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] // 2


@pytest.mark.parametrize(
    ("taper", "as_generated"),
    [({}, True), ({"mode": "full"}, False), ({"mode": "compare"}, False), ({"reuse": "exact"}, False)],
)
def test_outputs_come_back_in_their_own_tokens_where_filled_cells_may_be_seen(server, monkeypatch, taper, as_generated):
    encode, asked = server.llm.encode, []
    monkeypatch.setattr(
        server.llm, "encode", lambda *args, **how: asked.append(how["as_generated"]) or encode(*args, **how)
    )
    text = server.chat("say something", taper=taper).json()["choices"][0]["message"]["content"]
    assert asked == [as_generated]
    assert server.llm.tokenizer.decode(server.llm.outputs.by_text[text]).startswith(text)


def test_logprobs_are_the_models_own(server):
    reply = server.chat("five", logprobs=True, top_logprobs=3).json()["choices"][0]
    expected = reference_ids(server, "five", logprobs=3)
    assert reply["logprobs"]["refusal"] is None  # a field that OpenAI's document requires
    tokens = reply["logprobs"]["content"]
    for token, logprobs, token_id in zip(tokens, expected.logprobs, expected.token_ids, strict=True):
        assert token["logprob"] == pytest.approx(logprobs.logprob, abs=1e-4)
        text = server.llm.tokenizer.decode([token_id])
        assert token["token"] == text if "\ufffd" not in text else token["token"].startswith("bytes:")
        assert "\ufffd" in text or bytes(token["bytes"]).decode() == text
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["logprob"] == pytest.approx(token["logprob"])


def test_text_completions_take_texts_and_token_ids(server):
    prompts = ["ab", "cd"]
    fields = {"model": NAME, "temperature": 0, "max_tokens": 6, "logprobs": 2, "taper": {"ignore_eos": True}}
    texts = server.http.post("/v1/completions", json=fields | {"prompt": prompts}).json()
    token_ids = [server.llm.encode(prompt, raw=True) for prompt in prompts]
    ids = server.http.post("/v1/completions", json=fields | {"prompt": token_ids}).json()
    assert [choice["text"] for choice in texts["choices"]] == [choice["text"] for choice in ids["choices"]]
    for choice, prompt in zip(texts["choices"], prompts, strict=True):
        expected = reference_ids(server, prompt, raw=True, max_tokens=6, logprobs=2)
        assert choice["text"] == expected.text
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {6}
        assert logprobs["token_logprobs"] == pytest.approx([token.logprob for token in expected.logprobs], abs=1e-4)
        own = [server.llm.tokenizer.token_bytes(token_id) for token_id in expected.token_ids]
        complete = [codecs.utf_8_decode(b"".join(own[:step]), "replace", False)[0] for step in range(6)]
        assert logprobs["text_offset"] == list(map(len, complete))
    stream = events(server.http.post("/v1/completions", json=fields | {"prompt": "ab", "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in stream) == texts["choices"][0]["text"]
    assert texts["usage"]["prompt_tokens"] == 4


def test_without_max_tokens_a_text_completion_has_16_and_a_chat_what_the_context_holds(server):
    fields = {"model": NAME, "prompt": "ab", "taper": {"ignore_eos": True}}
    assert server.http.post("/v1/completions", json=fields).json()["usage"]["completion_tokens"] == 16
    assert server.chat("six", max_tokens=None).json()["usage"]["total_tokens"] == 256
    assert server.chat("six", max_tokens=None, max_completion_tokens=5).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"ignore_eos": True}, {"taper": {"ignore_eos": True}}),
        ({"cache_prompt": True, "mirostat": 0, "typical_p": 1.0, "verbosity": "medium", "prediction": None}, {}),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ],
)
def test_names_of_other_servers_mean_the_same(server, theirs, ours):
    body = {"model": NAME, "messages": [{"role": "user", "content": "one"}], "temperature": 0.0}
    limit = {} if "max_tokens" in ours else {"max_tokens": 12}
    replies = [server.http.post("/v1/chat/completions", json=body | limit | fields).json() for fields in (theirs, ours)]
    texts = [reply["choices"][0]["message"]["content"] for reply in replies]
    assert texts[0] == texts[1]
    assert replies[0]["usage"]["completion_tokens"] == replies[1]["usage"]["completion_tokens"]


def test_neither_eos_nor_a_stop_id_comes_before_min_tokens(server):
    """However probable it is: here a bias makes it the likeliest token by far."""
    eos = next(iter(server.llm.tokenizer.eos_token_ids))
    body = {
        "model": NAME,
        "prompt": "one",
        "temperature": 0.0,
        "max_tokens": 9,
        "logit_bias": {str(eos): 100, "70": 90},
    }
    for fields, tokens in (({}, 0), ({"min_tokens": 4}, 4), ({"min_tokens": 9}, 9)):
        reply = server.http.post("/v1/completions", json=body | fields).json()
        assert reply["usage"]["completion_tokens"] == tokens, fields
    fields = {"min_tokens": 3, "logit_bias": {"70": 100}, "taper": {"stop_token_ids": [70]}}
    assert server.http.post("/v1/completions", json=body | fields).json()["usage"]["completion_tokens"] == 3
    schema = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "integer"}}}
    chat = {"model": NAME, "messages": [{"role": "user", "content": "one"}], "min_tokens": 3, "response_format": schema}
    refused = server.http.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    assert "min_tokens does not go with a schema" in refused.json()["error"]["message"]


def test_what_clients_of_llama_server_ask_for(server):
    assert server.http.get("/v1/health").json() == {"status": "ok"}
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == server.llm.engine.backend.context_length
    assert props["total_slots"] == server.llm.engine.backend.num_slots
    assert props["model_alias"] == NAME
    for path, allowed in (("/v1/chat/completions", "POST"), ("/health", "GET")):
        options = server.http.options(path)
        assert options.status_code == 204
        assert allowed in options.headers["allow"]
    assert server.http.head("/props").status_code == 200
    assert server.http.options("/nowhere").status_code == 404


def test_a_bias_forces_a_token(server):
    (token_id,) = server.llm.encode("q", raw=True)
    assert server.chat("seven", logit_bias={str(token_id): 100}).json()["choices"][0]["message"]["content"] == "q" * 8


@pytest.mark.parametrize("name", ["full", *policies(6)])
def test_each_policy_can_be_asked_for(server, name):
    expected = reference_ids(server, "eight", name, max_tokens=30)
    for fields in [{"policy": name}] + [{"mode": "full"}] * (name == "full"):
        reply = server.chat("eight", taper=fields, max_tokens=30).json()["choices"][0]
        assert (reply["message"]["content"], reply["taper"]["depths"]) == (expected.text, expected.depths)


def test_sixty_four_random_concurrent_requests_give_the_ids_that_they_give_alone(server, other_llm):
    """Lengths, policies, streaming and clients that leave, on four slots. A byte is a token of this model."""
    rng = np.random.default_rng(4)
    names = list(server.served.policies)
    asked = []
    for i in range(64):
        content = "shared beginning of many prompts " * int(rng.integers(3)) + f"number {i} "
        content = content[: int(rng.integers(9, 90))]
        fields = {"max_tokens": int(rng.integers(1, 40)), "taper": {"policy": names[rng.integers(len(names))]}}
        if rng.random() < 0.4:
            fields |= {"temperature": 0.8, "seed": int(rng.integers(100))}
        asked.append((content, fields, rng.random()))

    def ask(request):
        content, fields, fate = request
        if fate > 0.5:
            return server.chat(content, **fields).json()["choices"][0]["message"]["content"]
        text, cut = "", 3 if fate < 0.2 else 1000
        body = chat_body(content, **fields, stream=True)
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            for count, line in enumerate(response.iter_lines()):
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"]["content"]
                if count > cut:
                    break
        return text

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(ask, asked))
    assert server.is_idle()
    for (content, fields, fate), text in zip(asked, got, strict=True):
        options = {key: fields[key] for key in ("max_tokens", "temperature", "seed") if key in fields}
        expected = server.chat(content, **fields).json()["choices"][0]["message"]["content"]
        alone = reference_ids(server, content, fields["taper"]["policy"], llm=other_llm, **options).text
        assert expected == alone
        assert text == alone if fate >= 0.2 else alone.startswith(text)


# JSON and tools


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


ENDS = {"ignore_eos": False}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema_is_kept_even_by_a_random_model(server, temperature):
    response_format = {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA, "strict": True}}
    fields = {"temperature": temperature, "seed": 1, "max_tokens": 60, "n": 3, "taper": ENDS}
    for choice in server.chat("ten", response_format=response_format, **fields).json()["choices"]:
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"ok", "kind"}
        assert value["kind"] in ("a", "b")
        assert choice["finish_reason"] == "stop"
        assert len(choice["taper"]["depths"]) > 10


@pytest.mark.parametrize(
    ("schema", "said"), [({"type": "nonsense"}, "nonsense"), ({"not": {}}, "not"), ({"$ref": "http://x/y"}, "x/y")]
)
def test_schemas_that_cannot_be_kept_are_refused(server, schema, said):
    response_format = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    response = server.chat(response_format=response_format, taper=ENDS)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_a_template_without_tools_is_told_of_them_in_a_message(tiny_llama):
    def tokens(**fields):
        return server.chat(**fields).json()["usage"]["prompt_tokens"]

    with serving(tiny_llama, context=1000) as server:
        assert tokens(tools=[TOOL]) > tokens() + 50
        assert tokens(tools=[TOOL], tool_choice="none") == tokens()


def test_tools_reach_the_template_and_calls_come_back(tiny_llama):
    """A random model calls no tool of itself, so each of its tokens is forced, as the call has no token twice."""
    with serving(tiny_llama, template=TOOLS_TEMPLATE, context=1000) as server:
        function = {"name": "weather", "arguments": '{"at": "sea"}'}
        history = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "mild"},
        ]
        plain = server.http.post("/tokenize", json={"messages": history}).json()["count"]
        usage = server.chat(messages=history, tools=[TOOL]).json()["usage"]
        control_tokens = 2
        added = len("system\n<tools></tools> <tool_call>\n") + len(json.dumps(TOOL)) + control_tokens
        assert usage["prompt_tokens"] == plain + added
        history[1]["tool_calls"][0]["function"]["arguments"] = "["
        assert "not a JSON object" in server.chat(messages=history).json()["error"]["message"]
        force_text(server, '\n<tool_call>\n{"name": "weather", "arguments": {"at": "sea"}}\n</tool_call>')
        reply = server.chat(tools=[TOOL], max_tokens=100, taper=ENDS).json()["choices"][0]
        (call,) = reply["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"at": "sea"}'}
        assert (reply["message"]["content"], reply["finish_reason"]) == (None, "tool_calls")
        chunks = events(server.chat(tools=[TOOL], max_tokens=100, taper=ENDS, stream=True))
        calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert [call["function"].get("name") for call in calls] == ["weather", *[None] * (len(calls) - 1)]
        assert {call["index"] for call in calls} == {0}
        assert len(calls) > 3  # in pieces
        assert "".join(call["function"]["arguments"] for call in calls) == '{"at": "sea"}'
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == ""
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        for stop, arguments in (
            ("sea", ['{"at": "']),
            ("weather", []),
            ("}", ['{"at": "sea"']),
            ("</", ['{"at": "sea"}']),
        ):
            reply = server.chat(tools=[TOOL], max_tokens=100, stop=stop, taper=ENDS).json()["choices"][0]
            calls = reply["message"].get("tool_calls", [])
            assert [call["function"]["arguments"] for call in calls] == arguments
            assert reply["finish_reason"] == ("tool_calls" if stop == "</" else "stop")
            assert not reply["message"]["content"]


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
TIME = {"type": "function", "function": {"name": "now"}}


def test_a_call_can_be_required_even_of_a_random_model(tiny_llama):
    weather = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    named = {"type": "function", "function": {"name": "weather"}}
    with serving(tiny_llama, template=TOOLS_TEMPLATE, context=1000) as server:
        fields = {"tools": [weather, TIME], "max_tokens": 300, "taper": ENDS, "parallel_tool_calls": False}
        for choice in (named, "required"):
            for seed in range(3):
                reply = server.chat(**fields, tool_choice=choice, temperature=1, seed=seed).json()["choices"][0]
                (call,) = reply["message"]["tool_calls"]
                assert reply["finish_reason"] == "tool_calls"
                if choice == named:
                    assert call["function"]["name"] == "weather"
                if call["function"]["name"] == "weather":
                    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
        cut = server.chat(**fields | {"max_tokens": 14}, tool_choice="required").json()["choices"][0]
        assert (cut["finish_reason"], cut["message"]["content"]) == ("length", None)
        assert "tool_calls" not in cut["message"]
        refused = {
            "tool_choice": [({"type": "function", "function": {"name": "other"}}, [weather]), ("required", [])],
        }
        for param, cases in refused.items():
            for choice, tools in cases:
                error = server.chat(tools=tools, tool_choice=choice, taper=ENDS).json()["error"]
                assert error["param"] == param
        odd = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
        error = server.chat(tools=[odd], tool_choice="required", taper=ENDS).json()["error"]
        assert error["param"] == "tools"


def test_an_effort_of_reasoning_is_none_or_for_a_model_that_thinks(tiny_llama):
    template = "{{ 'thinks' if enable_thinking else 'plain' }}{{ messages[0].content }}"
    with serving(tiny_llama, template=template) as server:

        def prompt_tokens(**fields):
            return server.chat(**fields).json()["usage"]["prompt_tokens"]

        assert prompt_tokens(reasoning_effort="none") == prompt_tokens(taper=ENDS | {"think": False})
        assert prompt_tokens(taper=ENDS | {"think": True}) != prompt_tokens(taper=ENDS | {"think": False})
        for fields in ({"reasoning_effort": "high"}, {"reasoning_effort": "none", "taper": ENDS | {"think": True}}):
            assert server.chat(**fields).json()["error"]["param"] == "reasoning_effort"


def test_parallel_tool_calls_false_ends_an_output_after_its_first_call(tiny_llama):
    call = '{"name": "weather", "arguments": {"at": "sea"}}'
    with serving(tiny_llama, template=TOOLS_TEMPLATE, context=1000) as server:
        force_text(server, f"first\n<tool_call>\n{call}\n</tool_call> more text <tool_call>")
        reply = server.chat(tools=[TOOL], max_tokens=100, taper=ENDS, parallel_tool_calls=False).json()["choices"][0]
        assert reply["message"]["content"] == "first"
        assert [call["function"]["arguments"] for call in reply["message"]["tool_calls"]] == ['{"at": "sea"}']
        assert reply["finish_reason"] == "tool_calls"


READ = {
    "name": "read",
    "description": "Reads a file",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"filePath": {"type": "string"}, "offset": {"description": "a line", "type": "number"}},
        "required": ["filePath"],
        "additionalProperties": False,
    },
}


CALLED = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"filePath":"a.py"}'}}


@pytest.mark.parametrize(
    "fields",
    [
        # opencode, through the AI SDK's provider for servers of OpenAI's kind
        {
            "messages": [
                {"role": "system", "content": "You are opencode."},
                {"role": "user", "content": [{"type": "text", "text": "Read it."}, {"type": "text", "text": "a.py"}]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [CALLED],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "<file>\n00001| x = 1\n</file>"},
            ],
            "temperature": 0.55,
            "top_p": 1,
            "tool_choice": "auto",
            "reasoning_effort": "medium",
        },
        # Cline and those that came from it
        {
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "You are Cline.", "cache_control": {"type": "ephemeral"}}],
                },
                {"role": "user", "content": [{"type": "text", "text": "<task>\nRead a.py\n</task>"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALLED | {"index": 0}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": ""},
                {"role": "user", "content": "go on"},
            ],
            "temperature": 0,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
    ],
)
def test_requests_of_coding_agents_are_taken(tiny_llama, fields):
    with serving(tiny_llama, template=TOOLS_TEMPLATE, context=1000) as server:
        tools = [{"type": "function", "function": READ}]
        stream = events(
            server.chat(**fields, tools=tools, max_tokens=8, stream=True, stream_options={"include_usage": True})
        )
        assert stream[-1]["usage"]["completion_tokens"] == 8
        assert stream[-2]["choices"][0]["finish_reason"] == "length"


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
NESTED = '<tool_call>{"name": "f", "arguments": {"a": "}\\"</tool_call>{", "b": {}}, "id": 3}</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "said", "arguments"),
    [
        (f"hi\n{CALL}\nbye\n", "hibye\n", ['{"a": 1}']),
        (f"{CALL}\n{CALL}\n", "", ['{"a": 1}'] * 2),
        (f"{CALL}\n{CALL}\nbye", "bye", ['{"a": 1}'] * 2),
        (NESTED, "", ['{"a": "}\\"</tool_call>{", "b": {}}']),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", ['{"a": 1}']),
        ('<tool_call>{"name": "f", "arguments": {"a": [1', "", ['{"a": [1']),
        ('<tool_call>{"name": "f", "arguments": {}}', "", ["{}"]),
        ("a\n<tool_call>nonsense</tool_call>\nb", "a\n<tool_call>nonsense</tool_call>\nb", []),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', []),
        (
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
            [],
        ),
        ('a\n<tool_call>{"name"', "a", []),
        ('<tool_call>\n{"name": "f", ', "", []),
        ("a\n<tool_call>", "a", []),
        ("a\n<tool_call>no", "a\n<tool_call>no", []),
        ("a < b\n\n<tool", "a < b\n\n<tool", []),
    ],
)
def test_calls_are_found_however_the_text_is_cut(text, said, arguments, size):
    parser, content, deltas = ToolCallParser(), "", []
    for start in range(0, len(text) + size, size):
        more, grown = parser.push(text[start : start + size], last=start >= len(text))
        assert len({delta["index"] for delta in grown}) == len(grown)
        content, deltas = content + more, deltas + grown
    calls = [call["function"] for call in join_calls(deltas)]
    assert (content, calls) == (said, [{"name": "f", "arguments": text} for text in arguments])
    assert parser.num_calls == len(calls)


def force_text(server, text: str) -> None:
    """Make every completion this text, and then end."""
    ids = [*server.llm.encode(text, raw=True), *server.llm.tokenizer.eos_token_ids]

    class Script:
        def __init__(self):
            self.left = list(ids)

        def restrict(self, logits):
            forced = np.full_like(logits, -math.inf)
            forced[self.left[0]] = 0
            return forced

        def accept(self, token_id):
            assert self.left.pop(0) == token_id

    chat = server.served.chat
    server.served.chat = lambda body, _: chat(body, Script)


# Other routes


def test_the_model_and_its_policies_are_listed_and_it_is_ready(server):
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["taper"]["num_hidden_layers"]) == (NAME, "model", 6)
    assert set(model["taper"]["policies"]) == {"full", *policies(6)}
    assert [name for name, policy in model["taper"]["policies"].items() if policy["default"]] == ["d3"]
    assert server.http.get(f"/v1/models/{NAME}").json() == model
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready", "model": NAME}


def test_tokenize_counts_as_the_prompt_is_counted(server):
    reply = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]}).json()
    assert reply["tokens"] == server.llm.encode("hello")
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 256)
    raw = server.http.post("/tokenize", json={"prompt": "hello"}).json()
    assert raw["tokens"] == server.llm.encode("hello", raw=True)
    assert server.http.post("/tokenize", json={}).status_code == 400


def test_metrics_count_tokens_and_layers(server):
    names = [f"taper_{name}" for name in ("completion_tokens_total", "layers_run_total", "layers_skipped_total")]
    names += ["taper_mean_depth_count", 'taper_completions_total{finish_reason="length"}']
    before = [server.metric(name) for name in names]
    reply = server.chat("eleven", taper={"policy": "static"}).json()["choices"][0]["taper"]
    run = sum(reply["depths"])
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [8, run, 6 * 8 - run, 1, 1]
    assert server.metric("taper_slots") == 4
    assert 0 < server.metric("taper_kv_cache_tokens") <= server.metric("taper_kv_cache_capacity_tokens") == 4 * 256


# Clients


@pytest.mark.ci
def test_the_openai_client_works_unchanged(server):
    from openai import BadRequestError, NotFoundError, OpenAI
    from pydantic import BaseModel

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "one"}]
    options = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 8}
    extra = {"extra_body": {"taper": {"ignore_eos": True}}}
    reply = client.chat.completions.create(**options, **extra)
    expected = reference_ids(server, "one")
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].taper["depths"] == expected.depths
    stream = client.chat.completions.create(**options, **extra, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in stream) == expected.text
    again = [*messages, reply.choices[0].message, *messages]
    assert client.chat.completions.create(**options | {"messages": again}).usage.prompt_tokens > 20
    assert client.completions.create(model=NAME, prompt="ab", max_tokens=3).choices[0].finish_reason
    assert [model.id for model in client.models.list()] == [NAME]
    with pytest.raises(BadRequestError, match="mirostat is 2, which is not supported"):
        client.chat.completions.create(**options, extra_body={"mirostat": 2})
    with pytest.raises(NotFoundError, match="gpt-5"):
        client.chat.completions.create(**options | {"model": "gpt-5"})

    class Health(BaseModel):
        ok: bool

    parsed = client.chat.completions.parse(model=NAME, messages=messages, response_format=Health, max_tokens=50)
    assert isinstance(parsed.choices[0].message.parsed.ok, bool)


@pytest.mark.ci
def test_langchain_works_unchanged(server):
    from langchain_openai import ChatOpenAI

    options = {"temperature": 0, "max_tokens": 8, "extra_body": {"taper": {"ignore_eos": True}}}
    chat = ChatOpenAI(model=NAME, base_url=f"{server.url}/v1", api_key="none", **options)
    expected = reference_ids(server, "one")
    reply = chat.invoke("one")
    assert reply.content == expected.text
    assert reply.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in chat.stream("one")) == expected.text


@pytest.mark.ci
def test_llm_works_unchanged(server, tmp_path):
    """Simon Willison's llm, with a model of its list of OpenAI-compatible ones."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: taper\n  model_name: {NAME}\n  api_base: {server.url}/v1\n"
    )
    from llm.cli import cli

    options = ["-m", "taper", "--key", "none", "--no-log", "-o", "temperature", "0", "-o", "max_tokens", "8"]
    expected = reference_ids(server, "one", ignore_eos=False).text.strip()
    for more in ([], ["--no-stream"]):
        done = CliRunner(env={"LLM_USER_PATH": str(tmp_path)}).invoke(cli, [*options, *more, "one"])
        assert (done.exit_code, done.stdout.strip()) == (0, expected), done.output
