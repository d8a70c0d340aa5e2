"""What people report of programs like ours: each kind of fault with two cases, its right value, and no name of ours.

The kinds came from public reports about llama.cpp, vLLM, Ollama, transformers and their clients.
"""

from __future__ import annotations

import gzip
import json
import shutil
import socket
from operator import methodcaller
from pathlib import Path

import gguf
import httpx
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forked import run_taper
from safetensors.torch import load_file, save_file
from serving import NAME, TOOLS_TEMPLATE, chat_body, serving
from test_server import events
from tiny import byte_tokenizer, make_tiny, random_prompt, write_gguf
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer

from taper import LLM, DepthPolicy, SamplingParams, hf
from taper.cli import cli
from taper.errors import ModelError, RequestError
from taper.lab.calibration.prompts import read_prompts
from taper.lab.evals.tasks import load_tasks
from taper.models import find_model, load_model, model_name, pull
from taper.models.download import find_hub_model, pull_hub_model
from taper.models.files import parts_of
from taper.server.limits import Limits

USER = {"role": "user", "content": "What time is it?"}


def sentencepiece() -> tuple[FastTokenizer, dict[str, int]]:
    """A pipeline as Llama 2 has it: words with the space before them, bytes for what is no word."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aceghrtu"]
    merges = []
    for word in ("true", "the", "cat"):
        for whole in (word, f"▁{word}"):
            for end in range(2, len(whole) + 1):
                if (pair := (whole[: end - 1], whole[end - 1])) not in merges:
                    merges.append(pair)
                    pieces += [whole[:end]] if whole[:end] not in pieces else []
    vocab = {piece: index for index, piece in enumerate(pieces)}
    fast = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    return fast, vocab


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tiny model with this tokenizer, and its vocabulary."""
    tiny = make_tiny(tmp_path_factory.mktemp("pieces"), layers=6)
    fast, vocab = sentencepiece()
    fast.save(str(tiny.folder / "tokenizer.json"))
    (tiny.folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return tiny, vocab


@pytest.fixture(scope="module")
def pieces_server(pieces):
    with serving(pieces[0]) as running:
        yield running


def complete(server, prompt, **fields) -> dict:
    body = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 3, "taper": {"ignore_eos": True}} | fields
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def refused(response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    return response.json()["error"]


# A completion continues its prompt


@pytest.mark.parametrize(("piece", "tokens", "text"), [("▁true", 1, " true"), ("true", 1, "true"), ("▁", 2, "  ")])
def test_a_raw_completion_has_the_space_that_separates_it_from_its_prompt(pieces, pieces_server, piece, tokens, text):
    tiny, vocab = pieces
    params = SamplingParams(max_tokens=tokens, logit_bias={vocab[piece]: 100}, ignore_eos=True)
    llm = pieces_server.llm
    for prompt in ("the cat", "true"):
        output = llm.generate(prompt, params, raw=True)
        assert output.text == text
        whole = AutoTokenizer.from_pretrained(tiny.folder).decode([*llm.encode(prompt, raw=True), *output.token_ids])
        assert prompt + text == whole
        with llm.stream(prompt, params, raw=True) as stream:
            assert "".join(chunk.text for chunk in stream) == text
        fields = {"max_tokens": tokens, "logit_bias": {str(vocab[piece]): 100}}
        for given in (prompt, llm.encode(prompt, raw=True)):
            assert complete(pieces_server, given, **fields)["text"] == text


def test_a_completion_completes_the_character_that_its_prompt_of_tokens_begins(pieces, pieces_server):
    _, vocab = pieces
    first, second, *rest = (vocab[f"<0x{byte:02X}>"] for byte in "🦙".encode())
    prompt = [vocab["▁the"], first, second]
    choice = complete(pieces_server, prompt, max_tokens=1, logit_bias={str(rest[0]): 100})
    assert choice["text"] == ""  # three of four bytes
    params = [SamplingParams(max_tokens=1, logit_bias={token: 100}) for token in rest]
    ids = prompt
    for one in params:
        ids = [*ids, *pieces_server.llm.engine.complete([_request(pieces_server.llm, ids, one)])[0]]
    assert pieces_server.llm.tokenizer.decode(ids) == "the🦙"


def _request(llm, ids, params):
    from taper.engine import Request

    return Request(ids, params, DepthPolicy.full(6))


# Log-probabilities name their own tokens


def test_names_of_tokens_are_different_and_their_offsets_lie_in_the_text(pieces, pieces_server):
    _, vocab = pieces
    choice = complete(pieces_server, "the cat", logprobs=5, logit_bias={str(vocab["▁true"]): 100})
    shown = choice["logprobs"]
    assert (choice["text"], shown["tokens"]) == (" true true true", [" true"] * 3)
    assert shown["text_offset"] == [0, 5, 10]
    assert [len(top) for top in shown["top_logprobs"]] == [5] * 3
    reply = pieces_server.http.post(
        "/v1/completions", json={"model": NAME, "prompt": "a", "max_tokens": 1, "logprobs": 20, "temperature": 0}
    ).json()["choices"][0]["logprobs"]
    assert len(reply["top_logprobs"][0]) == 20
    assert reply["top_logprobs"][0][reply["tokens"][0]] == reply["token_logprobs"][0]


@pytest.mark.parametrize("character", ["🦙", "é"])
def test_parts_of_characters_have_their_bytes(server, character):
    own = character.encode()
    alphabet = server.llm.tokenizer
    ids = [alphabet.encode(character, add_special_tokens=False)[index] for index in range(len(own))]
    texts, offsets, at = [], [], 0
    for index, token_id in enumerate(ids):  # each byte is a token: force one after the other
        choice = complete(server, ids[:index] or "x", max_tokens=1, logprobs=3, logit_bias={str(token_id): 100})
        logprobs = choice["logprobs"]
        texts.append(logprobs["tokens"][0])
        offsets.append(logprobs["text_offset"][0])
        at += index == len(ids) - 1
        assert len(logprobs["top_logprobs"][0]) == 3
    assert texts == [f"bytes:\\x{byte:02x}" for byte in own]
    assert set(offsets) == {0}
    reply = server.chat(logprobs=True, top_logprobs=1, max_tokens=1, logit_bias={str(ids[0]): 100}).json()
    (token,) = reply["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == (f"bytes:\\x{own[0]:02x}", [own[0]])


def test_chats_of_sentencepiece_models_name_tokens_as_their_text_has_them(pieces):
    tiny, vocab = pieces
    with serving(tiny, template="{% for m in messages %}{{ m.content }}{% endfor %}") as running:
        fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 3, "logit_bias": {str(vocab["▁true"]): 100}}
        choice = running.chat("the cat", **fields).json()["choices"][0]
    assert choice["message"]["content"] == "true true true"
    content = choice["logprobs"]["content"]
    assert [token["token"] for token in content] == ["true", " true", " true"]
    assert b"".join(bytes(token["bytes"]) for token in content) == b"true true true"


# What ends an output


def copy_gguf(source: Path, target: Path, add, without: tuple[str, ...] = (), tensors: slice = slice(None)) -> Path:
    """A copy of a GGUF file, or of some of its tensors, with the metadata that `add` writes; `without` some keys."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *without):
            kind, *inner = entry.types
            writer.add_key_value(name, entry.contents(), kind, inner[-1] if inner else None)
    add(writer)
    for tensor in reader.tensors[tensors]:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("name", ["eom_token_id", "eot_token_id"])
def test_each_token_by_which_a_file_ends_a_message_ends_an_output(tiny_llama, tmp_path, name):
    write_gguf(tmp_path / "m.gguf", tiny_llama)
    add = methodcaller("add_uint32", f"tokenizer.ggml.{name}", 70)
    llm = LLM(copy_gguf(tmp_path / "m.gguf", tmp_path / "changed.gguf", add), threads=1, context=64)
    assert 70 in llm.tokenizer.eos_token_ids
    output = llm.generate("call", SamplingParams(max_tokens=5, logit_bias={70: 100}), mode="full")
    assert (output.finish_reason, output.token_ids) == ("stop", [])


def test_the_end_of_a_message_ends_an_output_by_its_name_alone(folder):
    fast = byte_tokenizer()
    fast.add_special_tokens(["<|eom_id|>"])
    fast.save(str(folder / "tokenizer.json"))
    assert fast.token_to_id("<|eom_id|>") in load_model(folder).tokenizer.eos_token_ids


# Special tokens wherever a folder keeps them

BOTH_ENDS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("written", ["text", "object"])
@pytest.mark.parametrize("config", ["without them", "null", "missing"])
def test_special_tokens_of_a_map_reach_the_template(folder, written, config):
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    stored = {
        name: {"content": token, "lstrip": False} if written == "object" else token for name, token in tokens.items()
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(stored))
    (folder / "tokenizer_config.json").unlink()
    if config != "missing":
        nulls = dict.fromkeys(tokens) if config == "null" else {}
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": BOTH_ENDS, **nulls}))
    (folder / "chat_template.jinja").write_text(BOTH_ENDS)
    ours = LLM(folder, threads=1, context=64).encode("Hi")
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ours == theirs["input_ids"]
    assert len(ours) == 4


# Text files

PROMPTS = [f"Question {number}?" for number in range(6)] + ["one\u2028two", "three\u0085four\x0cfive"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("form", ["lines of JSON", "lines", "a list", "a list of texts"])
def test_prompts_are_read_as_they_were_written(tmp_path, mark, end, form):
    objects = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in PROMPTS]
    lines = {"lines of JSON": objects, "lines": PROMPTS, "a list": [f"[{', '.join(objects)}]"]}
    lines["a list of texts"] = [json.dumps(PROMPTS, ensure_ascii=False)]
    file = tmp_path / "prompts"
    file.write_bytes(mark + (end.join(lines[form]) + end).encode())
    assert read_prompts(file) == PROMPTS


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_problems_are_read_as_they_were_written(tmp_path, mark):
    problems = [{"prompt": f"a\u2028b {number}", "answer": str(number)} for number in range(3)]
    for name, text in {
        "lines.jsonl": "\r\n".join(json.dumps(problem, ensure_ascii=False) for problem in problems),
        "list.jsonl": json.dumps(problems),
    }.items():
        (tmp_path / name).write_bytes(mark + text.encode())
        assert [task.num_problems for task in load_tasks([str(tmp_path / name)]).tasks] == [3]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_folder_whose_files_begin_with_a_byte_order_mark_loads(folder, name):
    (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    expected = load_model(folder.with_name("model")).config
    assert load_model(folder).config == expected


@pytest.mark.parametrize("typed", [b"hi\n", b"hi\r\n", b"\xef\xbb\xbfhi", b"\xef\xbb\xbfhi\n"])
def test_standard_input_is_a_prompt_without_its_mark_and_its_last_line_break(tiny_gguf, typed):
    command = ["generate", "-", "--max-tokens", "3", "--json", "--model", str(tiny_gguf), "--threads", "1"]
    replies = [json.loads(CliRunner().invoke(cli, command, input=text).stdout) for text in (b"hi", typed, b"hi\n\n")]
    tokens = [reply["prompt_tokens"] for reply in replies]
    assert tokens == [tokens[0], tokens[0], tokens[0] + 1]


def test_a_system_message_from_a_file_loses_its_mark(tiny_gguf):
    command = ["generate", "hi", "--max-tokens", "3", "--json", "--model", str(tiny_gguf), "--threads", "1", "--system"]
    replies = [json.loads(CliRunner().invoke(cli, [*command, text]).stdout) for text in ("be brief", "\ufeffbe brief")]
    assert replies[0]["prompt_tokens"] == replies[1]["prompt_tokens"]


@pytest.mark.parametrize("prompt", ["-5 + 3 = ?", "--- what is this?", "-q"])
def test_a_prompt_that_begins_with_a_dash_gets_a_hint(prompt):
    code, _, said = run_taper("generate", prompt)
    assert code == 2
    assert b"comes after --" in said
    assert len(said.splitlines()) == 1


# Messages as agents send them

CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def history(content="12:00", call=CALL, **more) -> list[dict]:
    said = {"role": "assistant", "content": None, "tool_calls": [call]} | more
    return [USER, said, {"role": "tool", "tool_call_id": "call_1", "content": content}]


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}], " "])
def test_a_tool_may_have_nothing_to_say(tools_server, content):
    assert tools_server.chat(messages=history(content)).status_code == 200


@pytest.mark.parametrize("arguments", ["", " ", "null", None, "{}", {}])
def test_a_call_without_arguments_has_none(tools_server, arguments):
    call = CALL | {"function": {"name": "now", "arguments": arguments}}
    counts = {
        tools_server.http.post("/tokenize", json={"messages": history(call=one)}).json()["count"]
        for one in (call, CALL)
    }
    assert len(counts) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"type": "message"},
        {"refusal": None, "audio": None, "annotations": []},
        {"refusal": "", "annotations": [{"type": "url_citation"}]},
        {"function_call": None, "id": "msg_1", "status": "completed"},
        {"reasoning_content": "hm"},
        {"content": [{"type": "text", "text": "so", "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_what_clients_add_to_messages_ends_no_conversation(tools_server, more):
    assert tools_server.chat(messages=history(**more)).status_code == 200
    assert tools_server.chat(messages=history(call=CALL | {"index": 0})).status_code == 200  # as our own stream sends


def test_a_refusal_is_what_the_model_said(server):
    said = [{"role": "assistant", "content": "no"}, {"role": "assistant", "content": None, "refusal": "no"}]
    counts = {server.http.post("/tokenize", json={"messages": [USER, one, USER]}).json()["count"] for one in said}
    assert len(counts) == 1


# Named templates

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("form", ["a list", "files", "gguf"])
def test_requests_with_tools_use_the_template_for_tools(tiny_llama, tmp_path, form):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if form == "gguf":
        write_gguf(tmp_path / "m.gguf", tiny_llama)
        templates = [{"name": "default", "template": plain}, {"name": "tool_use", "template": TOOLS_TEMPLATE}]
        add, old = methodcaller("add_chat_template", templates), ("tokenizer.chat_template",)
        path = copy_gguf(tmp_path / "m.gguf", tmp_path / "templates.gguf", add, old)
    else:
        path = Path(shutil.copytree(tiny_llama.folder, tmp_path / "model"))
        listed = [{"name": "default", "template": plain}, {"name": "tool_use", "template": TOOLS_TEMPLATE}]
        if form == "files":
            (path / "chat_template.jinja").write_text(plain)
            (path / "additional_chat_templates").mkdir()
            (path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS_TEMPLATE)
        written = {"chat_template": listed} if form == "a list" else {}
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | written))
    tokenizer = load_model(path).tokenizer
    assert tokenizer.takes_tools
    assert tokenizer.render([USER]) == USER["content"]
    text = tokenizer.render([USER], [TOOL])
    assert '"weather"' in text
    if form != "gguf":
        theirs = AutoTokenizer.from_pretrained(path).apply_chat_template([USER], tools=[TOOL], tokenize=False)
        assert text == theirs


# The end of a conversation


@pytest.mark.parametrize("said", ["The colours are red,", "  a trailing space "])
def test_a_last_message_goes_on_where_that_is_asked_for(server, said):
    messages = [USER, {"role": "assistant", "content": said}]
    tokenizer = AutoTokenizer.from_pretrained(server.llm.model)

    def ours(**fields) -> list[int]:
        return server.http.post("/tokenize", json={"messages": messages, **fields}).json()["tokens"]

    def theirs(**fields) -> list[int]:
        return tokenizer.apply_chat_template(messages, **fields)["input_ids"]

    assert ours() == theirs(add_generation_prompt=True)
    assert ours(add_generation_prompt=False) == theirs(add_generation_prompt=False)
    going_on = ours(continue_final_message=True)
    assert bytes(server.llm.tokenizer.decode(going_on), "utf-8").endswith(said.encode())
    assert going_on == ours(continue_final_message=True, add_generation_prompt=False)
    usage = server.chat(messages=messages, continue_final_message=True).json()["usage"]
    assert usage["prompt_tokens"] == len(going_on)
    both = server.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert refused(both)["param"] == "add_generation_prompt"


# Schemas

SCORE = {"properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


def with_schema(server, schema) -> httpx.Response:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"} | schema}}
    fields = {"response_format": form, "max_tokens": 60, "taper": {"ignore_eos": False}}
    return server.chat("score", **fields)


@pytest.mark.parametrize("pattern", ["^ok$", "o"])
@pytest.mark.parametrize("required", [["ok"], []])
def test_a_pattern_that_matches_a_property_is_refused_before_the_output(server, pattern, required):
    schema = SCORE | {"required": required, "patternProperties": {pattern: {"type": "boolean"}}}
    error = refused(with_schema(server, schema))
    assert "matches 'ok'" in error["message"]
    assert error["param"] == "response_format.json_schema.schema"
    inside = {"properties": {"a": {"type": "object"} | schema}, "required": ["a"], "additionalProperties": False}
    assert "matches 'ok'" in refused(with_schema(server, inside))["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"patternProperties": {"^tag_[ab]$": {"type": "boolean"}}, "maxProperties": 1},
        {
            "patternProperties": {},
            "minProperties": 0,
            "propertyNames": {"type": "string"},
            "unevaluatedProperties": True,
        },
        {"description": "a score", "examples": [{"ok": True}], "deprecated": False, "x": 1} | {"x": 1},
    ],
)
def test_what_says_nothing_is_not_refused(server, more):
    more = {key: value for key, value in more.items() if key != "x"}
    response = with_schema(server, SCORE | more)
    assert response.status_code == 200, response.text
    assert isinstance(json.loads(response.json()["choices"][0]["message"]["content"])["ok"], bool)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1, "uniqueItems": False},
            [[True], [False]],
        ),
        ({"enum": ["a", "b"], "format": "int32"}, ["a", "b"]),
        ({"type": "string", "maxLength": 0, "format": "password", "minLength": 0}, [""]),
        ({"type": "integer", "minimum": 0, "maximum": 1, "exclusiveMinimum": False, "format": "int64"}, [0, 1]),
    ],
)
def test_keywords_at_their_defaults_and_formats_that_nobody_checks_pass(server, schema, values):
    response = with_schema(server, {"properties": {"v": schema}, "required": ["v"], "additionalProperties": False})
    assert response.status_code == 200, response.text
    assert json.loads(response.json()["choices"][0]["message"]["content"])["v"] in values


# Split GGUF files


@pytest.fixture
def parts(tiny_llama, tmp_path) -> list[Path]:
    write_gguf(tmp_path / "whole.gguf", tiny_llama)
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    (tmp_path / "split").mkdir()
    size = -(-len(reader.tensors) // 3)

    def part(number: int) -> Path:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 3)
            writer.add_int32("split.tensors.count", len(reader.tensors))

        target = tmp_path / "split" / f"m-{number + 1:05d}-of-00003.gguf"
        only_in_the_first = tuple(reader.fields) if number else ()
        tensors = slice(number * size, (number + 1) * size)
        return copy_gguf(tmp_path / "whole.gguf", target, add, only_in_the_first, tensors)

    return [part(number) for number in range(3)]


def test_a_split_model_loads_from_any_part_and_from_its_folder(parts):
    whole = load_model(parts[0].parent.parent / "whole.gguf")
    for path in (*parts, parts[0].parent):
        model = load_model(path)
        assert model.config == whole.config
        assert all(np.array_equal(tensor.data, whole.tensors[name].data) for name, tensor in model.tensors.items())
    assert parts_of(parts[2]) == parts
    assert model_name(parts[1]) == "m"


def test_all_parts_are_fetched_by_the_name_of_one(monkeypatch, parts):
    asked = []

    def download(repository, file, **options):
        asked.append((repository, file, options))
        return str(parts[0].with_name(Path(file).name))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for name in ("org/name/q4/m-00002-of-00003.gguf", "org/name/m-00003-of-00003.gguf"):
        for find, options in ((pull_hub_model, {}), (find_hub_model, {"local_files_only": True})):
            asked.clear()
            assert find(name) == parts[0]
            folder = name.removeprefix("org/name/").rpartition("m-")[0]
            files = [f"{folder}m-{part:05d}-of-00003.gguf" for part in (1, 2, 3)]
            assert asked == [("org/name", file, options) for file in files]


GGUFS = ["README.md", "m-Q8_0.gguf", "m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf", "mmproj-Q4_K_M.gguf", "big/m-bf16.gguf"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/name", "m-Q4_K_M.gguf"),
        ("org/name:q8_0", "m-Q8_0.gguf"),
        ("hf.co/org/name:Q4_K_M", "m-Q4_K_M.gguf"),
        ("https://huggingface.co/org/name/", "m-Q4_K_M.gguf"),
        ("huggingface.co/org/name:BF16", "big/m-bf16.gguf"),
        ("hf.co/org/name/m-Q8_0.gguf", "m-Q8_0.gguf"),
    ],
)
def test_names_as_other_programs_write_them_find_their_file(monkeypatch, tmp_path, name, file):
    for one in GGUFS:
        (tmp_path / one).parent.mkdir(exist_ok=True)
        (tmp_path / one).touch()
    asked = []

    def download(repository, wanted, **options):
        asked.append(repository)
        return str(tmp_path / wanted)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository, **_: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_: GGUFS)
    assert pull(name, lambda *_: None) == find_model(name) == tmp_path / file
    assert asked == ["org/name"] * 2


def test_a_type_that_a_repository_lacks_is_named_with_those_it_has(monkeypatch):
    files = ["m-Q8_0.gguf", "m-IQ3_XS.gguf"]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_: files)
    with pytest.raises(
        ModelError, match=r"has no Q4_K_M file; it has IQ3_XS, Q8_0 \(for example: taper pull a/b:IQ3_XS"
    ):
        pull("a/b", lambda *_: None)
    files[:] = ["weights.gguf"]
    with pytest.raises(ModelError, match=r"choose a file: taper pull a/b/weights\.gguf"):
        pull("hf.co/a/b", lambda *_: None)
    files[:] = ["model.onnx"]
    with pytest.raises(ModelError, match="no weights that Taper reads"):
        pull("a/b", lambda *_: None)


def test_what_is_missing_of_a_split_model_is_named(parts):
    shutil.copy(parts[0], parts[0].with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"one of 3 parts, but its name"):
        load_model(parts[0].with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"name a file"):  # two models in a folder
        load_model(parts[0].parent)
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelError, match="in an earlier part too"):
        load_model(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is missing"):
        load_model(parts[0])


# Which weights count


@pytest.mark.parametrize(
    "beside", ["consolidated.safetensors", "adapter_model.safetensors", "model.fp16.safetensors", "stale index"]
)
def test_other_weights_beside_a_models_own_do_not_count(folder, tiny_llama, beside):
    weights = load_file(folder / "model.safetensors")
    if beside == "stale index":
        index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00002.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / beside)
    assert load_model(folder).tensors.keys() == tiny_llama.load().tensors.keys()


@pytest.mark.parametrize("beside", ["consolidated.safetensors", "adapter_model.safetensors"])
@pytest.mark.parametrize("has_index", [True, False])
def test_nor_do_they_beside_shards(folder, tiny_llama, beside, has_index):
    weights = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((weights[::2], weights[1::2]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: value.clone() for key, value in part}, folder / name)
        weight_map |= {key: name for key, _ in part}
    if has_index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / beside)
    assert load_model(folder).tensors.keys() == tiny_llama.load().tensors.keys()


# The context of scaled models


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0}, 1024),
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"type": "dynamic", "factor": 2.0}, 512),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 64},
            512,
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
            | {"original_max_position_embeddings": 128},
            512,
        ),
    ],
)
def test_the_context_of_a_scaled_model_is_the_scaled_one(folder, scaling, limit):
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"max_position_embeddings": 512, "rope_theta": 1e4, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).config.max_position_embeddings == limit


@pytest.mark.parametrize(("kind", "limit"), [("yarn", 2048), ("linear", 2048)])
def test_so_is_that_of_a_gguf_file(tmp_path, kind, limit):
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 512} if kind == "yarn" else {}
    tiny = make_tiny(tmp_path, layers=2, rope_parameters=rope)
    tiny.hf.config.max_position_embeddings = 512
    write_gguf(tmp_path / "m.gguf", tiny)
    assert load_model(tmp_path / "m.gguf").config.max_position_embeddings == limit


# Names


def test_a_model_is_never_without_a_name(tmp_path, monkeypatch):
    (tmp_path / "one" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    for given in (".", "./", "../one", "../one/", "inner/..", str(tmp_path / "one")):
        assert model_name(given) == "one"
    assert model_name("/") == "model"
    assert model_name("models/x.Q4_0.gguf") == "x.Q4_0"


# HTTP as its standards say


def test_schemes_are_of_any_case(tiny_llama):
    with serving(tiny_llama, api_key="secret") as running:
        for scheme, status in (("bearer", 200), ("BEARER", 200), ("Bearer  ", 200), ("Basic", 401)):
            headers = {"authorization": f"{scheme} secret"}
            assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/"])
def test_heads_are_where_gets_are(server, path):
    head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert server.http.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses/resp_1", "/api/chat"])
def test_routes_that_others_have_are_refused_with_a_sentence(server, path):
    error = refused(server.http.post(path, json={}), 404)
    assert error["message"] == f"there is no {path} here; /docs lists what there is"


def test_the_page_of_the_api_names_every_route_and_field(server):
    page = server.http.get("/docs").text
    document = server.http.get("/openapi.json").json()
    for path in document["paths"]:
        assert f" {path}</code>" in page
    for field in document["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{field}</code>" in page
    assert "http://" not in page
    assert "https://" not in page


def test_models_are_listed_with_a_slash_too(server):
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()
    assert server.http.get(f"/v1/models/{NAME}").json()["id"] == NAME


@pytest.mark.parametrize("coding", ["gzip", "br"])
def test_a_compressed_body_is_refused_by_its_coding(server, coding):
    body = gzip.compress(json.dumps(chat_body()).encode())
    headers = {"content-type": "application/json", "content-encoding": coding}
    error = refused(server.http.post("/v1/chat/completions", content=body, headers=headers), 415)
    assert coding in error["message"]
    plain = headers | {"content-encoding": "identity"}
    assert server.http.post("/v1/chat/completions", json=chat_body(), headers=plain).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_mark_before_json_is_dropped(server, path):
    body = chat_body() if "chat" in path else {"prompt": "a"}
    content = b"\xef\xbb\xbf" + json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    assert server.http.post(path, content=content, headers=headers).status_code == 200


def test_idle_connections_outlive_those_of_clients():
    assert Limits().keep_alive_seconds > 60
    assert Limits(keep_alive_seconds=5).keep_alive_seconds == 5


# Null and defaults


@pytest.mark.parametrize(
    "fields",
    [
        {"taper": {"ignore_eos": True, "top_k": None, "min_p": None, "repetition_penalty": None, "policy": None}},
        {"stop": "", "tools": [], "tool_choice": None, "functions": [], "function_call": "none"},
        {"stop": ["", "\ud7ff"], "logit_bias": {"5": None}, "metadata": {"a": None}},
        {"top_logprobs": 0, "stream_options": {"include_usage": None}, "n": None, "seed": None},
        {"parallel_tool_calls": False, "modalities": ["text"], "response_format": {"type": "text"}},
        {"audio": None, "prediction": None, "reasoning_effort": "high", "web_search_options": None, "verbosity": None},
        {"messages": [USER | {"name": None, "tool_calls": None, "tool_call_id": None}]},
    ],
)
def test_null_and_what_asks_for_nothing_mean_not_given(server, fields):
    assert server.chat(**fields).status_code == 200
    nothing = chat_body() | {"taper": None, "stop": [], "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=nothing).status_code == 200


def test_null_where_something_is_needed_is_told(server):
    assert refused(server.chat(messages=None))["param"] == "messages"
    assert refused(server.chat(model=None))["param"] == "model"


# Errors point at what the client wrote


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages.1.content"),
        ({"messages": [USER | {"colour": 1}]}, "messages.0.colour"),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        (
            {"messages": history(call=CALL | {"function": {"name": "f", "arguments": "["}})},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"messages": [USER | {"content": "x" * 900}]}, "messages"),
        ({"stop": [5]}, "stop.0"),
        ({"temperature": 200}, "temperature"),
        ({"taper": {"top_k": -2}}, "taper.top_k"),
        ({"taper": {"repetition_penalty": 1000}}, "taper.repetition_penalty"),
        ({"repetition_penalty": 1000}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"taper": {"stop_token_ids": [-4]}}, "taper.stop_token_ids"),
        ({"taper": {"policy": "nonsense"}}, "taper.policy"),
        ({"taper": {"policy": "d3", "mode": "full"}}, "taper.mode"),
        ({"taper": {"think": True}}, "taper.think"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"n": 100}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
    ],
)
def test_every_error_names_the_field(server, fields, param):
    error = refused(server.chat(**fields))
    assert error["param"] == param
    if error["message"].startswith(param.rpartition(".")[2] + " is "):
        assert "." not in param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "x" * 999]}, "prompt.1"),
        ({"prompt": [[1], [99999]]}, "prompt.1"),
        ({"prompt": [[1], []]}, "prompt.1"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"] * 100}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 5}, "n"),
        ({"logprobs": 30}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"taper": {"think": True}}, "taper.think"),
    ],
)
def test_so_do_those_of_texts(server, fields, param):
    body = {"model": NAME, "prompt": "a", "max_tokens": 1} | fields
    assert refused(server.http.post("/v1/completions", json=body))["param"] == param


# Counting


@pytest.mark.parametrize(("text", "count"), [("", 0), (" ", 1), ("\n", 1), ("x" * 1000, 1000)])
def test_any_text_can_be_counted(server, text, count):
    reply = server.http.post("/tokenize", json={"prompt": text}).json()
    assert (reply["count"], len(reply["tokens"])) == (count, count)


@pytest.mark.parametrize("prompt", [" ", "\n\n", ["a", " "]])
def test_a_blank_prompt_is_a_prompt(server, prompt):
    assert complete(server, prompt, logprobs=False)["logprobs"] is None
    assert len(complete(server, prompt)["text"]) >= 0


# Options that could never work


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("http://localhost:3000/", "http://localhost:3000"),
        ("HTTPS://Example.org:443", "https://example.org"),
        ("*", "*"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_an_address_where_an_origin_is_meant_is_mended(given, origin):
    assert Limits(cors_origins=(given,)).cors_origins == (origin,)


@pytest.mark.parametrize(
    "options",
    [
        {"cors_origins": ("example.org",)},
        {"cors_origins": ("http://example.org/app",)},
        {"cors_origins": ("",)},
        {"host": "http://127.0.0.1"},
        {"host": ""},
        {"keep_alive_seconds": 0},
    ],
)
def test_what_can_never_work_is_refused_at_the_start(options):
    with pytest.raises(RequestError):
        Limits(**options)


def test_a_folder_where_a_file_is_meant_is_told(tiny_gguf, tmp_path):
    for option in ("--policy", "--name"):
        value = "" if option == "--name" else str(tmp_path)
        result = CliRunner().invoke(cli, ["serve", "--model", str(tiny_gguf), "--port", "0", option, value])
        assert result.exit_code != 0
    with pytest.raises(RequestError, match="Is a directory"):
        read_prompts(tmp_path)


# Stop strings in transformers


@pytest.mark.parametrize("stops", [["a"], "a"])
def test_stop_strings_are_refused_with_the_way_that_works(tiny_llama, stops):
    from transformers import StoppingCriteriaList, StopStringCriteria

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama.folder)
    ids = torch.tensor([random_prompt(3)])
    custom = hf.custom_generate(DepthPolicy.d3(6, 0.95, skip_order=[4, 2]))
    how = {"max_new_tokens": 24, "do_sample": False, "custom_generate": custom}
    whole = tiny_llama.hf.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, ids.shape[1] :]
    with pytest.raises(RequestError, match="StopStringCriteria"):
        tiny_llama.hf.generate(ids, stop_strings=stops, tokenizer=tokenizer, **how)
    stop = next(text for text in map(tokenizer.decode, whole.tolist()[3:]) if text.isascii() and text)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    cut = tiny_llama.hf.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=criteria, **how)
    assert cut.shape[1] < ids.shape[1] + 24


def test_a_connection_is_kept_while_it_is_idle(server):
    with socket.create_connection(server.address) as connection:
        for _ in range(2):
            connection.sendall(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)


def test_events_of_a_stream_name_their_tokens_as_the_reply_does(server):
    fields = {"logprobs": 2, "max_tokens": 6, "prompt": "hm", "model": NAME, "temperature": 0}
    fields["taper"] = {"ignore_eos": True}
    whole = server.http.post("/v1/completions", json=fields).json()["choices"][0]["logprobs"]
    parts = [
        chunk["choices"][0]["logprobs"]
        for chunk in events(server.http.post("/v1/completions", json=fields | {"stream": True}))
    ]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts if part for item in part[name]] == whole[name]
