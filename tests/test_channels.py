"""Outputs that are messages in channels: thoughts and calls come out as those of every other model, and go back in."""

from __future__ import annotations

import json
import shutil

import pytest
from serving import named_events, serving
from test_server import force_text
from test_tool_calls import lead
from tiny import TinyModel
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from taper.cli.terminal import Thoughts
from taper.errors import RequestError
from taper.models import load_model
from taper.models.channels import ChannelText
from taper.models.tokenizer import Tokenizer

CONTROL = [f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "return", "call")]
# Laid out as gpt-oss's template: a message has thoughts or content beside its call, thoughts before an answer are left
# out, and a result names the last call.
HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort | default('medium') + '<|end|>' }}
{%- for tool in tools or [] %}{{- '<|start|>developer<|message|>' + tool.function.name + '<|end|>' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls is defined %}
{%- if message.content and message.thinking %}{{- raise_exception('content and thinking') }}{% endif %}
{%- set thought = message.content or message.thinking %}
{%- if thought %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
BEGIN = "<|start|>system<|message|>Reasoning: medium<|end|>"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ENDS = {"ignore_eos": False}

ANSWER = "<|channel|>analysis<|message|>So it\nis.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + '{"city": "Rome"}'
THOUGHT = "<think>\nSo it\nis.\n</think>\n\n"
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def harmony(tiny_llama, tmp_path_factory) -> TinyModel:
    """The tiny model with the control tokens and the template of channels."""
    folder = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(tiny_llama.folder, folder)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": HARMONY, "eos_token": "<|return|>"}))
    return TinyModel(tiny_llama.hf, folder)


@pytest.fixture(scope="module")
def tokenizer(harmony) -> Tokenizer:
    return load_model(harmony.folder).tokenizer


def text_of(tokenizer: Tokenizer, output: str, is_cut: bool = False) -> str:
    stream = tokenizer.text_stream(None)
    return "".join(map(stream.push, tokenizer.encode(output))) + stream.flush(is_cut)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (ANSWER, f"{THOUGHT}Yes."),
        ("<|channel|>final<|message|>Yes.", "Yes."),
        ("Yes, to be.", "Yes, to be."),  # without a header
        ("to", "to"),
        (CALL, CALLED),
        (" to=functions.weather<|channel|>commentary json<|message|>" + '{"city": "Rome"}', CALLED),
        (ANSWER.replace("final", "commentary") + "<|end|><|start|>assistant" + CALL, f"{THOUGHT}Yes.\n\n{CALLED}"),
        (ANSWER.replace("final", "analysis"), "<think>\nSo it\nis.\n\nYes.\n</think>"),
        ("<|channel|>final<|message|>é<|end|><|start|>assistant<|channel|>final<|message|>!", "é\n\n!"),
    ],
)
def test_channels_become_the_tags_of_thoughts_and_calls(tokenizer, output, text):
    assert text_of(tokenizer, output) == text
    thoughts = Thoughts(is_inside=False)
    stream = tokenizer.text_stream(None)
    pieces = [*map(stream.push, tokenizer.encode(output)), stream.flush()]
    shown = "".join(piece for piece in pieces if piece and not thoughts.take(piece))
    assert shown.strip() == text.rpartition("</think>")[2].strip()


@pytest.fixture(scope="module", params=["control tokens", "parts of texts"])
def gemma4(request, tiny_llama, tmp_path_factory) -> Tokenizer:
    """A tokenizer whose outputs have thoughts in a channel; files differ in whether its tokens are control tokens."""
    folder = tmp_path_factory.mktemp("gemma4") / "model"
    shutil.copytree(tiny_llama.folder, folder)
    fast, special = FastTokenizer.from_file(str(folder / "tokenizer.json")), request.param == "control tokens"
    fast.add_tokens([AddedToken(name, special=special, normalized=False) for name in ("<|channel>", "<channel|>")])
    fast.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content + '|' }}{% endfor %}{# <|channel> #}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    return load_model(folder).tokenizer


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("<|channel>thought\nSo it\nis.<channel|>Yes.", f"{THOUGHT}Yes."),
        ("<|channel>thought\n<channel|>Yes.", "<think>\n\n</think>\n\nYes."),
        ("Yes, <channel|>so.", "Yes, so."),
        ("<|channel>thought\nSo it\nis.", "<think>\nSo it\nis.\n</think>"),
        ("<|channel>thou", "<think>\n\n</think>"),
    ],
)
def test_thoughts_in_a_channel_become_those_of_other_models(gemma4, output, text):
    assert text_of(gemma4, output) == text
    assert text_of(gemma4, output, is_cut=True) == text.removesuffix("\n</think>")
    assert gemma4.thinks


def test_earlier_thoughts_do_not_go_back_into_a_channel(gemma4):
    messages = [{"role": "user", "content": "<think>a</think>b"}, {"role": "assistant", "content": f"{THOUGHT}Yes."}]
    assert gemma4.decode(gemma4.encode_messages(messages)) == "<think>a</think>b|Yes.|"


def test_an_output_that_is_cut_lacks_its_end(tokenizer):
    assert text_of(tokenizer, CALL[:-1], is_cut=True) == CALLED[: -len("}}\n</tool_call>")]
    assert text_of(tokenizer, ANSWER[: ANSWER.index("<|end|>")], is_cut=True) == "<think>\nSo it\nis."
    assert text_of(tokenizer, ANSWER[: ANSWER.index("final")], is_cut=True) == "<think>\nSo it\nis."


def test_names_of_control_tokens_that_an_output_spells_out_are_text():
    channels = ChannelText()
    assert channels.push_control("<|channel|>") + channels.push("final") + channels.push_control("<|message|>") == ""
    assert channels.push("<|channel|>analysis<|message|>") == "<|channel|>analysis<|message|>"


def test_an_output_ends_with_an_answer_or_a_call_and_not_with_a_message(tokenizer):
    names = {tokenizer.special_tokens[token_id] for token_id in tokenizer.eos_token_ids}
    assert names == {"<|return|>", "<|call|>", "<|im_end|>", "<|endoftext|>"}


def test_a_conversation_goes_back_in_its_channels(tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "<|end|>?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "So.", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    ids = tokenizer.encode_messages(messages)
    assert [tokenizer.special_tokens.get(i) for i in ids].count("<|end|>") == 6  # not the user's
    text = "".join(tokenizer.special_tokens.get(i) or tokenizer.token_bytes(i).decode() for i in ids)
    assert text == (
        f"{BEGIN}<|start|>user<|message|><|end|>?<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
        "<|start|>user<|message|>And?<|end|><|start|>assistant<|channel|>analysis<|message|>So.\n\nLet me look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>1<|end|><|start|>assistant"
    )
    with pytest.raises(RequestError, match="one at a time"):
        tokenizer.encode_messages([messages[0], messages[3] | {"tool_calls": [call, call]}])


def test_how_much_to_think_is_said_to_the_template(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    assert "Reasoning: high" in tokenizer.render(messages, think="high")
    assert "Reasoning: medium" in tokenizer.render(messages, think=True)
    with pytest.raises(RequestError, match="no switch"):
        tokenizer.render(messages, think=False)


@pytest.mark.parametrize("route", ["responses", "messages", "chat/completions"])
def test_servers_replies_have_thoughts_and_calls_of_their_own(harmony, route):
    with serving(harmony, template=HARMONY) as server:
        if route == "responses":
            fields = {"input": "hi", "max_output_tokens": 200, "tools": [{"type": "function", "name": "weather"}]}
        else:
            fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "tools": [WEATHER]}
        if route == "messages":
            fields["tools"] = [{"name": "weather", "input_schema": {"type": "object"}}]
        fields |= {"model": "tiny", "taper": ENDS}
        force_text(server, ANSWER.split("<|start|>")[0] + "<|start|>assistant" + CALL)
        reply = server.http.post(f"/v1/{route}", json=fields).json()
        if route == "responses":
            reasoning, call = reply["output"]
            assert reasoning["content"][0]["text"] == "So it\nis."
            assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})
            assert named_events(server.http.post("/v1/responses", json=fields | {"stream": True}))[-1]["response"]
        elif route == "messages":
            thought, call = reply["content"]
            assert (thought["thinking"], reply["stop_reason"]) == ("So it\nis.", "tool_use")
            assert (call["name"], call["input"]) == ("weather", {"city": "Rome"})
        else:
            (choice,) = reply["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] == "<think>\nSo it\nis.\n</think>"
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
            effort = [
                server.http.post(f"/v1/{route}", json=fields | {"reasoning_effort": how, "max_tokens": 1}).json()
                for how in ("low", "medium")
            ]
            assert [one["usage"]["prompt_tokens"] for one in effort][1] == effort[0]["usage"]["prompt_tokens"] + 3


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}


def test_what_must_be_json_is_a_message_in_its_channel(harmony):
    with serving(harmony, template=HARMONY) as server:
        llm = server.llm
        schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        answer = server.chat(response_format=schema, max_tokens=100, taper=ENDS, logprobs=True).json()["choices"][0]
        called = server.chat(tools=[STRICT], tool_choice="required", max_tokens=100, taper=ENDS).json()["choices"][0]
    assert json.loads(answer["message"]["content"])["city"] in ("Rome", "Oslo")
    assert [token["token"] for token in answer["logprobs"]["content"][:7]] == ["<|channel|>", *"final", "<|message|>"]
    (call,) = called["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    begun = llm.encode("{", raw=True)
    continued = llm.generate(begun, max_tokens=100, response_format=CITY, temperature=0)
    assert json.loads(continued.text)["city"] in ("Rome", "Oslo")


def test_arguments_of_a_call_that_a_model_begins_keep_the_schema(harmony):
    with serving(harmony, template=HARMONY) as server:
        lead(server, CALL[: CALL.index("Rome")])
        choice = server.chat(tools=[STRICT], max_tokens=100, taper=ENDS).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
