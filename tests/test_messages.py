"""Anthropic's messages: blocks, events in their order, tools, JSON, thoughts, counts and errors."""

from __future__ import annotations

import json

import pytest
from serving import NAME, before_each_forward, named_events, serving
from test_responses import CALL, TEXT, THINKING
from test_server import CITY, ENDS, force_text

WEATHER = {"name": "weather", "input_schema": CITY}
USER = {"role": "user", "content": "tell me"}


def ask(server, path="", **fields):
    body = {"model": NAME, "messages": [USER]} | ({} if path else {"temperature": 0, "max_tokens": 180})
    return server.http.post(f"/v1/messages{path}", json=body | fields)


def lasting(reply: dict) -> dict:
    """A reply without what differs each time."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in reply["content"]]
    usage = {"output_tokens": reply["usage"]["output_tokens"]}
    return {key: reply[key] for key in ("role", "model", "stop_reason", "stop_sequence")} | usage | {"content": content}


def folded(events: list[dict]) -> dict:
    """The reply that the events of a stream add up to, as Anthropic's client adds them up."""
    message = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, kind = message["content"][event["index"]], event["delta"].pop("type")
            (name, text), *_ = event["delta"].items()
            assert kind == f"{name.replace('partial', 'input')}_delta"
            block[name] = block.get(name, "") + text
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json"))
    return message


def test_a_message_has_the_text_the_usage_and_the_depths_of_a_chat(server):
    chat = server.chat("one").json()
    reply = ask(server, messages=[USER | {"content": "one"}], max_tokens=8, taper=TEXT).json()
    assert reply["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", NAME)
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None)
    usage = reply["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    assert reply["taper"]["depths"] == chat["choices"][0]["taper"]["depths"]


BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        ("hello there", ["text"], "end_turn"),
        (CALL, ["tool_use"], "tool_use"),
        (f"Sure.\n{CALL}\n{CALL}", ["text", "tool_use", "tool_use"], "tool_use"),
    ],
)
def test_a_stream_adds_up_to_the_whole_reply(tools_server, monkeypatch, text, kinds, reason):
    monkeypatch.setattr(tools_server.served, "chat", tools_server.served.chat)
    force_text(tools_server, text)
    fields = {"tools": [WEATHER], "system": "Be brief.", "taper": ENDS}
    whole = ask(tools_server, **fields).json()
    events = named_events(ask(tools_server, **fields, stream=True))
    names = [event["type"] for event in events]
    distinct = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    assert distinct == ["message_start", *BLOCK * len(kinds), "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert lasting(folded(events)) == lasting(whole)
    assert ([block["type"] for block in whole["content"]], whole["stop_reason"]) == (kinds, reason)
    for block in whole["content"]:
        assert block["type"] != "tool_use" or block["input"] == {"city": "Rome"}


def test_a_call_that_is_cut_has_the_arguments_that_came(tools_server, monkeypatch):
    monkeypatch.setattr(tools_server.served, "chat", tools_server.served.chat)
    force_text(tools_server, CALL)
    size = len(tools_server.llm.encode(CALL[: CALL.index("}")], raw=True))
    reply = ask(tools_server, tools=[WEATHER], taper=ENDS, max_tokens=size).json()
    assert (reply["content"][0]["input"], reply["stop_reason"]) == ({"city": "Rome"}, "max_tokens")
    reply = ask(tools_server, tools=[WEATHER], taper=ENDS, max_tokens=size - 8).json()
    assert reply["content"][0]["input"] == {}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_can_be_required_even_of_a_random_model(tools_server, choice):
    choice |= {"disable_parallel_tool_use": True}
    reply = ask(tools_server, tools=[WEATHER], tool_choice=choice, temperature=1, max_tokens=300, taper=ENDS).json()
    (call,) = reply["content"]
    assert (call["type"], call["name"], reply["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert call["input"]["city"] in ("Rome", "Oslo")


def test_the_blocks_of_a_conversation_make_the_prompt_of_the_same_chat(tools_server, monkeypatch):
    """As coding agents send them: with notes of caches, metadata and settings of thoughts."""
    encode, asked = tools_server.llm.encode, []
    monkeypatch.setattr(tools_server.llm, "encode", lambda prompt, **how: asked.append(prompt) or encode(prompt, **how))
    cache = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    text = {"type": "text", "text": "You are an agent."}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"} | cache]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": ""},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "call_2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "20 degrees"} | cache,
                {"type": "tool_result", "tool_use_id": "call_2", "content": [text], "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    agents = {"metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": False}
    agents |= {"tools": [WEATHER | cache], "tool_choice": {"type": "auto"}, "output_config": {"effort": "high"}}
    agents |= {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    reply = ask(tools_server, "?beta=true", messages=messages, system=[text | cache], max_tokens=100, **agents)
    assert reply.status_code == 200, reply.text
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for number, arguments in ((1, {"city": "Rome"}), (2, {}))
    ]
    assert asked == [
        [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "content": "One moment.", "reasoning_content": "Look.", "tool_calls": calls},
            {"role": "tool", "content": "20 degrees", "tool_call_id": "call_1"},
            {"role": "tool", "content": "You are an agent.", "tool_call_id": "call_2"},
            {"role": "user", "content": "Go on."},
        ]
    ]


def test_an_output_goes_on_with_the_assistants_last_message(server):
    messages = [USER, {"role": "assistant", "content": "It is"}]
    reply = ask(server, messages=messages, max_tokens=8, taper=TEXT).json()
    chat = server.chat(messages=messages, continue_final_message=True).json()
    assert reply["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_a_text_can_be_json_that_keeps_a_schema(server):
    config = {"format": {"type": "json_schema", "schema": CITY}}
    reply = ask(server, output_config=config, temperature=1, max_tokens=200).json()
    assert json.loads(reply["content"][0]["text"])["city"] in ("Rome", "Oslo")


def test_a_stop_sequence_is_named(server):
    text = ask(server, max_tokens=20, taper=TEXT).json()["content"][0]["text"]
    reply = ask(server, max_tokens=20, taper=TEXT, stop_sequences=["\ud7ff", text[3:5]]).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", text[3:5])
    assert reply["content"][0]["text"] == text[: text.find(text[3:5])]


def test_thoughts_are_blocks_of_their_own(tiny_llama):
    begun = "{% if enable_thinking %}{{ '<think>\n' }}{% endif %}"
    with serving(tiny_llama, template=THINKING + begun) as server:
        force_text(server, "So it\nis.\n</think>\n\nYes.")
        fields = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "taper": ENDS}
        whole = ask(server, **fields).json()
        assert lasting(folded(named_events(ask(server, **fields, stream=True)))) == lasting(whole)
        assert whole["content"] == [
            {"type": "thinking", "thinking": "So it\nis.", "signature": ""},
            {"type": "text", "text": "Yes."},
        ]
        counts = {
            kind: ask(server, "/count_tokens", thinking={"type": kind}).json()["input_tokens"]
            for kind in ("enabled", "adaptive", "disabled")
        }
        assert counts["enabled"] == counts["adaptive"] + len("<think>\n")
        assert counts["disabled"] == counts["adaptive"] + len("<think>\n</think>\n")


def test_input_is_counted_as_it_is_in_a_reply(tools_server):
    fields = {"system": "Be brief.", "tools": [WEATHER]}
    usage = ask(tools_server, **fields).json()["usage"]
    count = ask(tools_server, "/count_tokens", **fields).json()
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"container": "c"}, "container is 'c', which is not supported (leave it out)"),
        ({"speed": "fast"}, "speed is 'fast', which is not supported (leave it out)"),
        ({"nonsense": 2}, "unknown field 'nonsense'"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"stop_sequences": [5]}, "stop_sequences.0: input should be a valid string (given: 5)"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0: only these types are supported: text, thinking, tool_use, tool_result "
            "(given: {'type': 'image', 'source': {}})",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]},
            "a tool_use block in a message of role user; "
            "thinking and tool_use are the assistant's, and tool_result is the user's",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0.type: input should be 'custom' (given: 'web_search_20250305')",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a tool that is not in tools (add it)"),
        (
            {"tools": [WEATHER], "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "tools and output_config.format exclude each other (leave out one of the two)",
        ),
        (
            {"thinking": {"type": "disabled"}, "taper": {"think": True}},
            "thinking and taper.think are two names of one switch (give one of the two)",
        ),
        (
            {"taper": {"mode": "compare"}},
            "mode compare gives two outputs, and this reply has one (use /v1/chat/completions)",
        ),
    ],
)
def test_what_is_refused_is_named_as_it_is_in_the_request(server, fields, message):
    response = ask(server, **fields)
    assert response.status_code == 400
    assert response.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def test_every_error_has_anthropics_form(tiny_llama, monkeypatch):
    with serving(tiny_llama, api_key="secret", max_body_bytes=2000) as server:
        replies = {
            "not_found_error": [ask(server, model="other"), server.http.get("/v1/messages/batches")],
            "authentication_error": [server.http.post("/v1/messages", headers={"authorization": "Bearer no"})],
            "request_too_large": [ask(server, system="x" * 3000)],
            "invalid_request_error": [server.http.post("/v1/messages", content="{"), server.http.put("/v1/messages")],
        }
        for kind, responses in replies.items():
            for response in responses:
                error = response.json()
                assert (error["type"], error["error"]["type"]) == ("error", kind)
        forwards = iter(range(4))
        before_each_forward(server, monkeypatch, lambda: next(forwards))
        *_, last = named_events(ask(server, taper=TEXT, stream=True))
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the server failed; its log says why"}}


def test_the_key_may_come_as_anthropics_clients_send_it(tiny_llama):
    with serving(tiny_llama, api_key="secret") as server:
        del server.http.headers["authorization"]
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "secret", "authorization": "Bearer other"}, 200),
            ({"x-api-key": "other"}, 401),
            ({}, 401),
        ):
            body = {"model": NAME, "max_tokens": 2, "messages": [USER]}
            assert server.http.post("/v1/messages", headers=headers, json=body).status_code == status
