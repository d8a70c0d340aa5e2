"""Official clients hold a conversation, follow a stream, call a tool and get a structured answer."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import pytest
from conftest import SCHEMA
from pydantic import BaseModel

KEY = "none"


class City(BaseModel):
    city: Literal["Rome", "Oslo"]


@pytest.fixture
def chat(server):
    """A conversation's first turns."""
    return [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": server.question},
    ]


def test_openai_chats(server, chat):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    options = {"model": server.model, "messages": chat, "temperature": 0, "max_tokens": 30}
    text = client.chat.completions.create(**options).choices[0].message.content
    stream = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text != ""
    tool = {"type": "function", "function": {"name": "visit", "parameters": SCHEMA, "strict": True}}
    reply = client.chat.completions.create(**options, tools=[tool], tool_choice="required").choices[0]
    (call, *_) = reply.message.tool_calls
    assert City.model_validate_json(call.function.arguments)
    again = [*chat, reply.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert client.chat.completions.create(**options | {"messages": again}, tools=[tool]).usage.prompt_tokens > 50
    parsed = client.chat.completions.parse(**options, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_openai_gets_responses(server, chat):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    options = {"model": server.model, "input": chat, "temperature": 0, "max_output_tokens": 30}
    text = client.responses.create(**options).output_text
    with client.responses.stream(**options) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == text != ""
    tool = {"type": "function", "name": "visit", "parameters": SCHEMA, "strict": True}
    options |= {"max_output_tokens": 100, "parallel_tool_calls": False}
    with client.responses.stream(**options, tools=[tool], tool_choice="required") as stream:
        call = stream.get_final_response().output[0]
    assert City.model_validate_json(call.arguments)
    again = [*chat, call, {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    assert client.responses.create(**options | {"input": again}, tools=[tool]).usage.input_tokens > 50
    assert isinstance(client.responses.parse(**options, text_format=City).output_parsed, City)


@pytest.mark.parametrize("protocol", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_openai_agents_run(server, protocol):
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    cities = []

    @agents.function_tool
    def visit(city: Literal["Rome", "Oslo"]) -> str:
        """Visit a city."""
        cities.append(city)
        return f"You are in {city}."

    async def run() -> None:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        model = getattr(agents, protocol)(server.model, client)
        settings = agents.ModelSettings(temperature=0, max_tokens=400)
        plain = agents.Agent("plain", instructions="Be brief.", model=model, model_settings=settings)
        first = await agents.Runner.run(plain, "My name is Ada.")
        conversation = [*first.to_input_list(), {"role": "user", "content": server.question}]
        text = (await agents.Runner.run(plain, conversation)).final_output
        stream = agents.Runner.run_streamed(plain, conversation)
        deltas = [
            event.data.delta
            async for event in stream.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == stream.final_output == text != ""
        calling = settings.resolve(agents.ModelSettings(tool_choice="required", parallel_tool_calls=False))
        caller = plain.clone(name="caller", tools=[visit], model_settings=calling)
        await agents.Runner.run(caller, server.question, max_turns=4)
        assert set(cities) <= {"Rome", "Oslo"} != set()
        structured = plain.clone(name="structured", output_type=City)
        assert isinstance((await agents.Runner.run(structured, server.question)).final_output, City)

    asyncio.run(run())
    assert cities


def test_anthropic_gets_messages(server, chat):
    from anthropic import Anthropic

    client = Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    options = {"model": server.model, "messages": chat, "max_tokens": 30}
    exact = options | {"extra_body": {"temperature": 0}}
    text = client.messages.create(**exact, system="Be brief.").content[0].text
    with client.messages.stream(**exact, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == text != ""
    tool = {"name": "visit", "input_schema": SCHEMA, "strict": True}
    options["max_tokens"] = 100
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**options, tools=[tool], tool_choice=choice) as stream:
        reply = stream.get_final_message()
    (call,) = reply.content
    assert (City.model_validate(call.input), reply.stop_reason) == (City(city=call.input["city"]), "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    again = options | {"messages": [*chat, reply.to_param(), {"role": "user", "content": [result]}]}
    usage = client.messages.create(**again, tools=[tool]).usage
    del again["max_tokens"]
    count = client.messages.count_tokens(**again, tools=[tool]).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert isinstance(client.messages.parse(**options, output_format=City).parsed_output, City)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_chats(server, chat, responses):
    from langchain_openai import ChatOpenAI

    options = {"temperature": 0, "max_tokens": 100, "use_responses_api": responses}
    model = ChatOpenAI(model=server.model, base_url=f"{server.url}/v1", api_key=KEY, **options)
    reply = model.invoke(chat)
    assert "".join(chunk.text for chunk in model.stream(chat)) == reply.text != ""
    tool = {"name": "visit", "description": "Visit a city.", "parameters": SCHEMA}
    call = model.bind_tools([tool], tool_choice="visit").invoke(chat).tool_calls[0]
    assert City.model_validate(call["args"])
    assert isinstance(model.with_structured_output(City).invoke(chat), City)


@pytest.mark.parametrize(("provider", "path"), [("openai", "/v1"), ("anthropic", "")])
def test_litellm_chats(server, chat, provider, path):
    import litellm

    options = {"api_key": KEY, "messages": chat, "temperature": 0, "max_tokens": 100}
    options |= {"model": f"{provider}/{server.model}", "api_base": f"{server.url}{path}"}
    text = litellm.completion(**options).choices[0].message.content
    stream = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text != ""
    tool = {"type": "function", "function": {"name": "visit", "parameters": SCHEMA}}
    reply = litellm.completion(**options, tools=[tool], tool_choice="required")
    assert City.model_validate_json(reply.choices[0].message.tool_calls[0].function.arguments)
    reply = litellm.completion(**options, response_format=City)
    assert City.model_validate_json(reply.choices[0].message.content)


@pytest.mark.parametrize(
    ("model", "route", "more"),
    [
        ("local-chat-completions", "chat/completions", {"apply_chat_template": True}),
        ("local-completions", "completions", {}),
    ],
)
def test_lm_eval_scores_problems(server, tmp_path, monkeypatch, model, route, more):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    problems = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "problems.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))  # JSON is YAML
    where = {"model": server.model, "base_url": f"{server.url}/v1/{route}", "tokenizer_backend": None}
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = simple_evaluate(model, where, tasks=["sums"], task_manager=manager, log_samples=True, **more)
    assert 0 <= results["results"]["sums"]["exact_match,none"] <= 1
    assert [len(sample["resps"]) for sample in results["samples"]["sums"]] == [1] * 4
