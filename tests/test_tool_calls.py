"""Tool calls with the added tokens that real vocabularies have for the tags, and in the forms that models write."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from itertools import product

import jsonschema
import numpy as np
import pytest
from serving import TOOLS_TEMPLATE, Server, running, serving
from tiny import TinyModel
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from taper import LLM
from taper.models.call_forms import find_call, undecided
from taper.models.download import PACKAGED_MODELS
from taper.models.grammars import Grammars
from taper.models.tool_texts import as_texts
from taper.server.limits import Limits
from taper.server.served import ServedModel
from taper.server.tool_calls import ToolCallParser, join_calls

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
ENDS = {"ignore_eos": False}
# The tags as Qwen and Hermes have them, as other files have them, and a vocabulary without them.
TAGS = {"text": False, "control tokens": True, "none": None}


@pytest.fixture(scope="module")
def with_tags(tiny_llama, tmp_path_factory):
    """The tiny model with added tokens for tags, by kind."""
    models = {}
    for kind, is_special in TAGS.items():
        folder = tmp_path_factory.mktemp("tags") / "model"
        shutil.copytree(tiny_llama.folder, folder)
        if is_special is not None:
            fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
            for tag in ("<tool_call>", "</tool_call>", "<think>"):
                fast.add_tokens([AddedToken(tag, special=is_special, normalized=False)])
            fast.save(str(folder / "tokenizer.json"))
        models[kind] = TinyModel(tiny_llama.hf, folder)
    return models


def lead(server, text: str) -> None:
    """Begin every completion with this text; what follows is up to the model, and to the filter of its request."""
    chat, ids = server.served.chat, server.llm.encode(text, raw=True)

    def led(body, token_filter):
        class Lead:
            def __init__(self):
                self.left, self.inner = list(ids), token_filter()

            def restrict(self, logits):
                if not self.left:
                    return self.inner.restrict(logits)
                assert self.inner.restrict(np.zeros_like(logits))[self.left[0]] == 0
                forced = np.full_like(logits, -math.inf)
                forced[self.left[0]] = 0
                return forced

            def accept(self, token_id):
                self.inner.accept(token_id)
                if self.left:
                    assert self.left.pop(0) == token_id

        return chat(body, Lead)

    server.served.chat = led


@pytest.mark.parametrize("kind", TAGS)
def test_required_calls_are_valid_whatever_the_vocabulary_has_for_tags(with_tags, kind):
    with serving(with_tags[kind], template=TOOLS_TEMPLATE, context=1000) as server:
        fields = {"tools": [WEATHER, NOW], "max_tokens": 300, "taper": ENDS, "tool_choice": "required"}
        for seed, only_one in product(range(3), (True, False)):
            fields |= {"temperature": 1, "seed": seed, "parallel_tool_calls": not only_one}
            choice = server.chat(**fields).json()["choices"][0]
            calls = choice["message"]["tool_calls"]
            assert (len(calls) == 1 or not only_one, choice["finish_reason"]) == (True, "tool_calls")
            for call in calls:
                arguments = json.loads(call["function"]["arguments"])
                assert arguments["city"] in ("Rome", "Oslo") if call["function"]["name"] == "weather" else not arguments


# What an output begins with, and what of it is content.
BEGINNINGS = {
    "tagged": ("Sure.\n<tool_call>", "Sure."),
    "fenced": ('Sure.\n```json\n{\n  "name": "weather",\n  "arguments": {', "Sure."),
    "fenced, of no language": ('```\n{"name": "weather", "arguments": {', None),
    "bare": (' {"name":"weather", "arguments":{', None),
}


@pytest.mark.parametrize("kind", TAGS)
@pytest.mark.parametrize("form", BEGINNINGS)
def test_a_call_keeps_its_schema_once_it_has_begun(with_tags, kind, form):
    """Even if a random model writes it, strict or not."""
    text, content = BEGINNINGS[form]
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    with serving(with_tags[kind], template=TOOLS_TEMPLATE, context=1000) as server:
        lead(server, text)
        for tools, choice in (([WEATHER], "auto"), ([strict], None)):
            fields = {"tools": tools, "max_tokens": 300, "taper": ENDS, "parallel_tool_calls": False}
            reply = server.chat(**fields, tool_choice=choice, temperature=1, seed=5).json()["choices"][0]
            (call,) = reply["message"]["tool_calls"]
            assert (reply["message"]["content"], reply["finish_reason"]) == (content, "tool_calls")
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_a_schema_that_cannot_be_kept_is_refused_only_if_it_must_be_kept(with_tags):
    with serving(with_tags["text"], template=TOOLS_TEMPLATE, context=1000) as server:
        for strict, status in ((None, 200), (False, 200), (True, 400)):
            function = {"name": "odd", "parameters": {"not": {}}, "strict": strict}
            assert server.chat(tools=[{"type": "function", "function": function}]).status_code == status


@pytest.mark.parametrize("text", ["<tool_call>", "a</tool_call>b", "<|im_end|>", "<think>", "x<|im_start|>"])
@pytest.mark.parametrize("kind", TAGS)
def test_a_schema_may_ask_for_text_that_an_added_token_spells(with_tags, kind, text):
    model = with_tags[kind].load()
    schema = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"], "additionalProperties": False}
    token_filter = Grammars(model.tokenizer, model.config.vocab_size).compile(schema)()
    rng, ids = np.random.default_rng(0), []
    while not token_filter.has_ended:
        allowed = np.flatnonzero(np.isfinite(token_filter.restrict(np.zeros(model.config.vocab_size, np.float32))))
        ids.append(int(rng.choice(allowed)))
        assert token_filter.num_allowed(ids[-1:]) == 1
        token_filter.accept(ids[-1])
    assert json.loads(model.tokenizer.decode(ids)) == {"a": text}


def test_a_stop_string_that_names_a_control_token_ends_the_output_there(with_tags):
    with LLM(str(with_tags["text"].folder), dtype="f32", threads=1, context=200) as llm:
        (token_id,) = llm.encode("<|im_start|>", raw=True)
        given = {"max_tokens": 5, "raw": True, "ignore_eos": True, "logit_bias": {token_id: 100}}
        assert llm.generate("ab", **given).finish_reason == "length"
        output = llm.generate("ab", stop=["no", "<|im_start|>"], **given)
        assert (output.finish_reason, output.text, output.token_ids) == ("stop", "", [])


FENCED = '```json\n{\n  "name": "f",\n  "arguments": {"a": {"b": "}"}}\n}\n```'
BARE = '{"name": "f", "arguments": {"a": 1}}'
ARGUMENTS = ['{"a": {"b": "}"}}', '{"a": 1}']


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (FENCED, "", ARGUMENTS[:1]),
        (BARE, "", ARGUMENTS[1:]),
        (f"Sure:\n\n{FENCED}\n\nand\n{BARE}\n", "Sure:and", ARGUMENTS),
        (f"{BARE}\n{BARE}", "", ARGUMENTS[1:] * 2),
        (f'{BARE[:-1]}, "id": 3}}\nbye', "bye", ARGUMENTS[1:]),
        (FENCED[:-3], "", ARGUMENTS[:1]),
        (FENCED[:-1], "", ARGUMENTS[:1]),
        (BARE[:-1], "", ARGUMENTS[1:]),
        (BARE[:-2], "", ['{"a": 1']),
        *(
            (text, text, [])
            for text in ('{"name": "g", "arguments": {}}', f"as {BARE}", "```python\nf()\n```", '{"nam')
        ),
        *((text, text, []) for text in ('```json\n{"a": 1}\n```', '{"name": "f", "arguments": [1]}', "\n\n```js")),
        (f"a\n{FENCED} <tool_call>{BARE}</tool_call>", "a ", ARGUMENTS),
    ],
)
def test_calls_without_tags_are_found_however_the_text_is_cut(text, content, arguments, size):
    parser, said, deltas = ToolCallParser(["f"]), "", []
    for start in range(0, len(text) + size, size):
        more, grown = parser.push(text[start : start + size], last=start >= len(text))
        said, deltas = said + more, deltas + grown
    calls = [call["function"] for call in join_calls(deltas)]
    assert (said, calls) == (content, [{"name": "f", "arguments": text} for text in arguments])


def test_text_is_held_back_only_while_it_may_begin_a_call():
    for text in (f"\n{FENCED}", f"\n  {BARE}", "a<tool_call>", "\n```\n" + BARE):
        whole = next(end for end in range(len(text) + 1) if find_call(text[:end], ["f"]))
        first = 1 if text.startswith("a") else 0
        assert all(undecided(text[:end]) == first for end in range(first + 1, whole))
    for text in ("\n```python", "\n{'", '\n{"names', "a `", "\n<tool_calls", '\n{"name": "f", "b'):
        assert undecided(text) == len(text)


# Qwen

QWEN = PACKAGED_MODELS["qwen2.5-coder-1.5b-instruct"]
QWEN_FILE = QWEN.path  # the user's own, before a test points the cache elsewhere
QUESTIONS = [
    *("What is the weather in Paris?", "How warm is it in Oslo, in fahrenheit?", "Will it rain in London today?"),
    *("Is it cold in Moscow right now?", "Tell me the temperature in Cairo.", "Do I need an umbrella in Lima?"),
    *("Weather for Tokyo, please.", "How is the weather in Berlin and is it warm?", "Is it sunny in Rome?"),
    *("What's the temperature in New York in celsius?", "Convert 20 dollars to euros.", "How many yen are 50 pounds?"),
    *("What are 1000 rupees in dollars?", "Change 5.50 euros to francs.", "How much is 12 USD in CAD?"),
    *("I have 300 pesos; what is that in euros?", "Convert 99.99 GBP to USD.", "One bitcoin in dollars?"),
    *("How many kroner do I get for 75 euros?", "Turn 10 dollars into yuan.", "Add a meeting with Tom tomorrow."),
    *("Put lunch with Ana and Bo on 2026-05-03 in my calendar.", "Add the dentist on Friday to my calendar."),
    *("Schedule a call with Mia on 2026-01-12.", "Plan a party on 2026-07-04 with Al, Bea and Cy."),
    *("Create an event: yoga, 2026-02-01.", "Book a review with the team on 2026-03-09 in the calendar."),
    *("Note my flight on 2026-08-15 in the calendar.", "Add 'pay rent' on the 1st of June 2026."),
    "Invite Zoe to dinner on 2026-09-09 and add it to my calendar.",
]
_TEXT = {"type": "string"}
TOOLS = {
    "get_weather": {"city": _TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "convert_currency": {"amount": {"type": "number"}, "source": _TEXT, "target": _TEXT},
    "add_event": {"title": _TEXT, "date": _TEXT, "guests": {"type": "array", "items": _TEXT}},
}
SCHEMAS = {
    name: {"type": "object", "properties": known, "required": list(known), "additionalProperties": False}
    for name, known in TOOLS.items()
}


@pytest.fixture(scope="module")
def qwen() -> Iterator[Server]:
    if not QWEN_FILE.exists():
        pytest.skip(f"needs the real model: taper pull {QWEN.name}")
    with LLM(QWEN_FILE, context=2048, max_batch_size=2) as llm:
        policies = {"full": llm.resolve_policy(mode="full"), **llm.shipped_policies()}
        with running(ServedModel("qwen", llm, policies, "fast", 4), Limits(port=0)) as server:
            yield server


def _calls(server: Server, stream: bool, body: dict) -> tuple[list[dict], str]:
    """The calls of a reply and its finish reason."""
    response = server.http.post("/v1/chat/completions", json=body | {"stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        (choice,) = response.json()["choices"]
        return [call["function"] for call in choice["message"].get("tool_calls", [])], choice["finish_reason"]
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", [])]
    return [call["function"] for call in join_calls(deltas)], choices[-1]["finish_reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "least"), [("required", 30), ("named", 30), ("auto", 24)])
def test_qwen_calls_tools(qwen, choice, least):
    """Streamed and whole, greedy and sampled, at full depth, tapered and exact, in turn."""
    tools = [{"type": "function", "function": {"name": n, "parameters": s, "strict": True}} for n, s in SCHEMAS.items()]
    valid = 0
    for number, question in enumerate(QUESTIONS):
        named = [*TOOLS][min(number // 10, 2)]
        body = {
            "model": "qwen",
            "messages": [{"role": "user", "content": question}],
            "tools": tools,
            "tool_choice": {"type": "function", "function": {"name": named}} if choice == "named" else choice,
            "max_tokens": 200,
            "taper": {"mode": ("full", "taper", "exact")[number % 3]},
        } | ({"temperature": 0} if number % 4 < 2 else {"seed": number})
        calls, reason = _calls(qwen, stream=number % 2 == 0, body=body)
        if calls and reason == "tool_calls":
            for call in calls:
                jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
                assert choice != "named" or call["name"] == named
            valid += 1
    assert valid >= least


def test_what_a_template_does_not_know_becomes_texts_that_are_read_as_calls():
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    messages = [
        {"role": "user", "content": "How is it in Rome and Oslo?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"type": "function", "function": call}] * 2},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
        {"role": "tool", "content": "snow", "tool_call_id": "2"},
        {"role": "assistant", "content": "Sunny and snow."},
    ]
    asked, called, gave, said = as_texts(messages, [WEATHER])
    assert asked["content"].endswith("\n\nHow is it in Rome and Oslo?")
    assert json.dumps(WEATHER["function"]) in asked["content"]
    content, parts = ToolCallParser(["weather"]).push(called["content"], last=True)
    assert content.strip() == "Let me see."
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in join_calls(parts)] == [
        ("weather", {"city": "Rome"})
    ] * 2
    assert gave["role"] == "user"
    assert gave["content"].count("<tool_response>") == 2
    assert said == messages[-1]
    assert as_texts(messages[:1], []) == messages[:1]
    system = {"role": "system", "content": "Be brief."}
    assert as_texts([system, *messages], [WEATHER])[0]["content"].startswith("Be brief.\n\nYou can call functions.")
