"""OpenAI's Responses: items, events in their order, tools, JSON, thoughts and counts; nothing is kept."""

from __future__ import annotations

import json

import pytest
from serving import NAME, before_each_forward, named_events, serving
from test_server import CITY, ENDS, force_text

TEXT = {"ignore_eos": True}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
# The end of a prompt as thinking models have it: a thought that has begun, one that is over, or none.
THINKING = (
    "{% for message in messages %}{{ message.reasoning_content or '' }}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n</think>\n' }}{% endif %}"
)


def respond(server, path="", **fields):
    body = {"model": NAME, "input": "tell me"} | ({} if path else {"temperature": 0, "max_output_tokens": 180})
    return server.http.post(f"/v1/responses{path}", json=body | fields)


def lasting(reply: dict) -> dict:
    """A reply without what differs each time."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in reply["output"]]
    usage = {key: value for key, value in reply["usage"].items() if key != "input_tokens_details"}
    times = ("id", "created_at", "taper")
    return {key: value for key, value in reply.items() if key not in times} | {"output": items, "usage": usage}


def test_a_response_has_the_text_the_usage_and_the_depths_of_a_chat(server):
    chat = server.chat("one").json()
    reply = respond(server, input="one", max_output_tokens=8, taper=TEXT).json()
    (item,) = reply["output"]
    text = chat["choices"][0]["message"]["content"]
    assert item["content"] == [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (reply["object"], reply["model"], reply["store"], reply["error"]) == ("response", NAME, False, None)
    usage, chats = reply["usage"], chat["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (chats["prompt_tokens"], chats["completion_tokens"])
    assert usage["input_tokens_details"]["cached_tokens"] > 0
    assert usage["total_tokens"] == chats["total_tokens"]
    assert reply["taper"]["depths"] == chat["choices"][0]["taper"]["depths"]


TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
TEXT_EVENTS += ["content_part.done", "output_item.done"]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def distinct(events: list[dict]) -> list[str]:
    """The names of events in their order, deltas that follow each other once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


@pytest.mark.parametrize(
    ("text", "kinds", "names"),
    [
        ("hello there", ["message"], TEXT_EVENTS),
        (CALL, ["function_call"], CALL_EVENTS),
        (f"Sure.\n{CALL}\n{CALL}", ["message", "function_call", "function_call"], TEXT_EVENTS + CALL_EVENTS * 2),
    ],
)
def test_a_stream_adds_up_to_the_whole_reply(tools_server, monkeypatch, text, kinds, names):
    monkeypatch.setattr(tools_server.served, "chat", tools_server.served.chat)
    force_text(tools_server, text)
    fields = {"tools": [WEATHER], "instructions": "Be brief.", "taper": ENDS}
    whole = respond(tools_server, **fields).json()
    events = named_events(respond(tools_server, **fields, stream=True))
    assert [item["type"] for item in whole["output"]] == kinds
    assert distinct(events) == ["created", "in_progress", *names, "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert lasting(events[-1]["response"]) == lasting(whole)
    assert events[0]["response"]["status"] == "in_progress"
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        value = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in own if "delta" in event) == value
        assert own[-1]["item"] == item


def test_a_call_in_a_stream_comes_in_pieces_after_its_name(tools_server, monkeypatch):
    monkeypatch.setattr(tools_server.served, "chat", tools_server.served.chat)
    force_text(tools_server, CALL)
    events = named_events(respond(tools_server, tools=[WEATHER], taper=ENDS, stream=True))
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert (added["name"], added["arguments"], added["status"]) == ("weather", "", "in_progress")
    assert sum(event["type"] == "response.function_call_arguments.delta" for event in events) > 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_can_be_required_even_of_a_random_model(tools_server, choice):
    fields = {"tools": [WEATHER], "temperature": 1, "max_output_tokens": 300, "parallel_tool_calls": False}
    reply = respond(tools_server, **fields, tool_choice=choice, taper=ENDS).json()
    (call,) = reply["output"]
    assert (call["type"], call["name"], reply["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert (reply["tool_choice"], reply["parallel_tool_calls"]) == (choice, False)


def test_the_items_of_a_conversation_make_the_prompt_of_the_same_chat(tools_server, monkeypatch):
    """As coding agents send them: with ids, statuses, notes of caches, and thoughts between the items."""
    encode, asked = tools_server.llm.encode, []
    monkeypatch.setattr(tools_server.llm, "encode", lambda prompt, **how: asked.append(prompt) or encode(prompt, **how))
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Is it "}, {"type": "input_text", "text": "warm?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "One moment.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "20 degrees"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "no city"}]},
    ]
    agents = {"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "1", "stream": False}
    agents |= {"reasoning": {"effort": "medium", "summary": "auto"}, "tool_choice": "auto", "parallel_tool_calls": True}
    reply = respond(tools_server, input=items, instructions="You are an agent.", tools=[WEATHER], **agents)
    assert reply.status_code == 200, reply.text
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for number, arguments in ((1, {"city": "Rome"}), (2, {}))
    ]
    assert asked == [
        [
            {"role": "system", "content": "You are an agent."},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "content": "One moment.", "reasoning_content": "Look.", "tool_calls": calls},
            {"role": "tool", "content": "20 degrees", "tool_call_id": "call_1"},
            {"role": "tool", "content": "no city", "tool_call_id": "call_2"},
        ]
    ]


@pytest.mark.parametrize(
    "format_", [{"type": "json_object"}, {"type": "json_schema", "name": "city", "strict": True, "schema": CITY}]
)
def test_a_text_can_be_json_that_keeps_a_schema(server, format_):
    reply = respond(
        server, text={"format": format_, "verbosity": "medium"}, temperature=1, max_output_tokens=200
    ).json()
    value = reply["output"][0]["content"][0]["text"]
    if format_["type"] == "json_schema":
        assert json.loads(value)["city"] in ("Rome", "Oslo")
    else:
        assert value.startswith("{")
    assert reply["text"]["format"] == format_


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("<think>\nSo  it\nis.\n</think>\n\nYes.", "So  it\nis.", "Yes."),
        (" <think></think>Yes.", None, "Yes."),
        ("Yes <think>no</think>", None, "Yes <think>no</think>"),
        ("<think>\nNever </thi", "Never </thi", None),
        ("<thin", None, "<thin"),
    ],
)
def test_thoughts_are_items_of_their_own(tiny_llama, text, thought, rest):
    with serving(tiny_llama, template=THINKING + "{{ '<think>' if never }}") as server:
        force_text(server, text)
        whole = respond(server, taper=ENDS).json()
        events = named_events(respond(server, taper=ENDS, stream=True))
    assert lasting(events[-1]["response"]) == lasting(whole)
    found = {item["type"]: item["content"][0]["text"] for item in whole["output"]}
    assert found == {kind: value for kind, value in (("reasoning", thought), ("message", rest)) if value}
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == (thought or "")
    assert (whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == text.lstrip().startswith("<think>")


def test_a_thought_may_begin_in_the_prompt_and_an_effort_of_none_leaves_it_out(tiny_llama):
    with serving(
        tiny_llama, template=THINKING + "{% if enable_thinking is not defined %}{{ '<think>\n' }}{% endif %}"
    ) as server:
        force_text(server, "so</think>\nYes.")
        kinds = [
            [item["type"] for item in respond(server, taper=ENDS, reasoning=reasoning).json()["output"]]
            for reasoning in ({}, {"effort": "none"})
        ]
    assert kinds == [["reasoning", "message"], ["message"]]


def test_input_is_counted_as_it_is_in_a_reply(tools_server):
    fields = {"instructions": "Be brief.", "tools": [WEATHER]}
    count = respond(tools_server, "/input_tokens", **fields).json()
    usage = respond(tools_server, **fields).json()["usage"]
    assert count == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    beyond = tools_server.http.post("/v1/responses/input_tokens", json={"input": "x" * 2000}).json()
    assert beyond["input_tokens"] > 2000


KEEPS = "leave it out, and send the whole conversation as input"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", f"store is True; this server keeps no responses ({KEEPS})"),
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id",
            f"previous_response_id is 'resp_1'; this server keeps no responses ({KEEPS})",
        ),
        ({"conversation": "c"}, "conversation", f"conversation is 'c'; this server keeps no conversations ({KEEPS})"),
        (
            {"background": True},
            "background",
            "background is True; this server keeps no responses to fetch later "
            "(leave it out, and set stream to follow it)",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is 2, which is not supported (leave it out)"),
        ({"nonsense": 2}, "nonsense", "unknown field 'nonsense'"),
        ({"input": []}, "input", "there is neither input nor instructions (give a text or messages)"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input.0",
            "input.0: only these types are supported: message, function_call, function_call_output, reasoning "
            "(given: {'type': 'item_reference', 'id': 'x'})",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1"}]},
            "input.0.arguments",
            "the arguments of a tool call are not a JSON object (send them back as the model wrote them)",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            "tools.0.type",
            "tools.0.type: input should be 'function' (given: 'web_search')",
        ),
        (
            {"tools": [WEATHER], "text": {"format": {"type": "json_object"}}},
            "tools",
            "tools and text.format exclude each other (leave out one of the two)",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format.schema",
            None,
        ),
        (
            {"max_output_tokens": 0},
            "max_output_tokens",
            "max_output_tokens is 0; it must be a whole number of at least 1",
        ),
        ({"input": "x" * 900}, "input", None),
        (
            {"taper": {"mode": "compare"}},
            "taper.mode",
            "mode compare gives two outputs, and this reply has one (use /v1/chat/completions)",
        ),
        ({"taper": {"policy": "nonsense"}}, "taper.policy", None),
        ({"model": "other"}, "model", "there is no model 'other'; this server has 'tiny'"),
    ],
)
def test_what_is_refused_is_named_as_it_is_in_the_request(server, fields, param, message):
    error = respond(server, **fields).json()["error"]
    assert error["param"] == param
    assert message in (None, error["message"])


def test_fields_that_ask_for_nothing_are_taken(server):
    nothing = {"store": None, "background": False, "previous_response_id": None, "truncation": "disabled"}
    nothing |= {"top_logprobs": 0, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u", "max_tool_calls": 3}
    nothing |= {"include": [], "stream_options": {"include_obfuscation": False}, "text": {"format": {"type": "text"}}}
    reply = respond(server, **nothing)
    assert reply.status_code == 200, reply.text
    assert reply.json()["metadata"] == {"a": "b"}


def test_a_stream_that_fails_ends_with_a_failed_response(tiny_llama, monkeypatch):
    with serving(tiny_llama) as server:
        forwards = iter(range(4))
        before_each_forward(server, monkeypatch, lambda: next(forwards))
        *_, last = named_events(respond(server, taper=TEXT, stream=True))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the server failed; its log says why"}


@pytest.mark.ci
def test_the_openai_client_works_unchanged(tools_server, monkeypatch):
    from openai import BadRequestError, OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    client = OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0)
    options = {"model": NAME, "input": "one", "temperature": 0, "max_output_tokens": 40}
    reply = client.responses.create(**options, extra_body={"taper": TEXT})
    assert reply.usage.output_tokens == 40
    with client.responses.stream(**options, extra_body={"taper": TEXT}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == reply.output_text
    assert client.responses.input_tokens.count(model=NAME, input="one").input_tokens == reply.usage.input_tokens
    with pytest.raises(BadRequestError, match="this server keeps no responses"):
        client.responses.create(**options, store=True)
    monkeypatch.setattr(tools_server.served, "chat", tools_server.served.chat)
    force_text(tools_server, CALL)
    options["max_output_tokens"] = 300
    with client.responses.stream(**options, tools=[WEATHER]) as stream:
        (call,) = stream.get_final_response().output
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    again = [
        {"role": "user", "content": "one"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "1"},
    ]
    assert client.responses.create(**options | {"input": again}).status == "completed"
    monkeypatch.undo()
    parsed = client.responses.parse(**options, text_format=City)
    assert isinstance(parsed.output_parsed, City)
