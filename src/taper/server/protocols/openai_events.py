"""OpenAI's events of chat and text completions, and llama-server's of what is filled in."""

from __future__ import annotations

import codecs
import time
import uuid
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...models.tokenizer import Tokenizer
from ...sampling import TokenLogprobs
from ...stream import Chunk, Output
from ..tool_calls import Json, ToolCallParser, join_calls
from .events import Events, server_sent, statistics
from .openai import CompletionRequest

_TOKEN_STATS = ("depth", "seconds")  # statistics of a token, which events have and replies have not


class ChoiceEvents(Events):
    """Events of OpenAI's form, with choices.

    Args:
        model: the name that clients know.
        tokenizer: the model's.
        n: outputs of each prompt.
        goes_on: whether the text of an output goes on from that of its prompt.
    """

    id_prefix: str
    event_object: str
    reply_object: str

    def __init__(self, model: str, tokenizer: Tokenizer, n: int, goes_on: bool) -> None:
        self._n = n
        self._shared = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        # By the index of the output; `_outputs` has those that have finished.
        self._outputs: dict[int, Output] = {}
        self._num_chunks = Counter[int]()
        self._texts = defaultdict[int, _TokenTexts](lambda: _TokenTexts(tokenizer, goes_on))

    def events(self, chunk: Chunk) -> list[Json]:
        if chunk.output is not None:
            self._outputs[chunk.index] = chunk.output
        self._num_chunks[chunk.index] += 1
        choice = {"index": chunk.index, **self._part(chunk), "taper": self._stats(chunk)}
        return [self._shared | {"object": self.event_object, "choices": [choice]}]

    def end(self, with_usage: bool) -> bytes:
        usage = self._shared | {"object": self.event_object, "choices": [], "usage": self._usage()}
        return (server_sent(usage) if with_usage else b"") + b"data: [DONE]\n\n"

    def fold(self, events: Iterable[Json]) -> Json:
        parts: dict[int, list[Json]] = {index: [] for index in sorted(self._outputs)}
        for event in events:
            (choice,) = event["choices"]
            parts[choice["index"]].append(choice)
        choices = []
        for index, choice_parts in parts.items():
            last = choice_parts[-1]
            stats = {name: value for name, value in last["taper"].items() if name not in _TOKEN_STATS}
            joined = self._join(choice_parts)
            choices.append({"index": index, **joined, "finish_reason": last["finish_reason"], "taper": stats})
        return self._shared | {"object": self.reply_object, "choices": choices, "usage": self._usage()}

    @abstractmethod
    def _part(self, chunk: Chunk) -> Json:
        """The text of a chunk with its log-probabilities, and the finish reason, null before the last chunk."""

    @abstractmethod
    def _join(self, parts: Sequence[Json]) -> Json:
        """The text and the log-probabilities of one output, from its parts of all events."""

    def _usage(self) -> Json:
        prompts = [output for index, output in self._outputs.items() if index % self._n == 0]  # each counts once
        prompt_tokens = sum(output.prompt_tokens for output in prompts)
        completion_tokens = sum(output.completion_tokens for output in self._outputs.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in prompts)},
        }

    def _stats(self, chunk: Chunk) -> Json:
        """Depth and time of a token, unless it is a stop token; in the last chunk, the statistics of the output too."""
        output, stats = chunk.output, Json()
        if output is None or self._num_chunks[chunk.index] == output.completion_tokens:
            stats |= {"depth": chunk.depth, "seconds": chunk.seconds}
        if output is not None:
            stats |= statistics(output)
        return stats


class ChatEvents(ChoiceEvents):
    """Events of a chat completion; if the request has tools, calls are taken out of the text."""

    id_prefix, event_object, reply_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, model: str, tokenizer: Tokenizer, n: int, goes_on: bool, tools: Sequence[str]) -> None:
        """Without the names of `tools`, all text is content."""
        super().__init__(model, tokenizer, n, goes_on)
        self._tools = tools
        self._parsers = defaultdict[int, ToolCallParser](lambda: ToolCallParser(tools))  # by index

    def _part(self, chunk: Chunk) -> Json:
        delta: Json = {"role": "assistant"} if self._num_chunks[chunk.index] == 1 else {}
        delta["content"], finish_reason = chunk.text, chunk.output.finish_reason if chunk.output else None
        if self._tools:
            parser = self._parsers[chunk.index]
            delta["content"], calls = parser.push(chunk.text, last=chunk.output is not None)
            if calls:
                delta["tool_calls"] = calls
            if parser.num_calls and finish_reason == "stop" and not parser.is_cut:
                finish_reason = "tool_calls"
        part: Json = {"delta": delta, "finish_reason": finish_reason}
        if chunk.logprobs is not None:
            texts = self._texts[chunk.index]
            top = [_logprob(texts, *pair) for pair in chunk.logprobs.top.items()]
            token = _logprob(texts, chunk.token_id, chunk.logprobs.logprob) | {"top_logprobs": top}
            texts.add(chunk.token_id)
            part["logprobs"] = {"content": [token], "refusal": None}
        return part

    def _join(self, parts: Sequence[Json]) -> Json:
        content = "".join(part["delta"]["content"] for part in parts)
        calls = join_calls(call for part in parts for call in part["delta"].get("tool_calls", []))
        logprobs = [token for part in parts if "logprobs" in part for token in part["logprobs"]["content"]]
        empty = None if self._tools else ""  # as a stream without text has it
        message: Json = {"role": "assistant", "content": content or empty, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": {"content": logprobs, "refusal": None} if logprobs else None}


class TextEvents(ChoiceEvents):
    """Events of a text completion; the reply begins with the prompt if the request asks for an echo."""

    id_prefix, event_object, reply_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, body: CompletionRequest) -> None:
        super().__init__(model, tokenizer, body.num_choices, goes_on=True)
        self._tokenizer, self._body = tokenizer, body

    def fold(self, events: Iterable[Json]) -> Json:
        if self._body.is_empty:  # a token was computed all the same
            for index, output in self._outputs.items():
                self._outputs[index] = replace(output, token_ids=[], depths=[])
        reply = super().fold(events)
        for choice in reply["choices"]:
            if self._body.is_empty:
                choice |= {"text": "", "finish_reason": "length"}
                choice["taper"] |= {"depths": []}
                choice["logprobs"] = choice["logprobs"] and {name: [] for name in choice["logprobs"]}
            if self._body.echo:
                self._put_prompt_before(choice, self._outputs[choice["index"]])
        return reply

    def _put_prompt_before(self, choice: Json, output: Output) -> None:
        scored = output.prompt_logprobs or []
        prompt = self._body.prompts[choice["index"] // self._n]
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        if choice["logprobs"] is not None:
            texts = _TokenTexts(self._tokenizer, goes_on=False)
            before: Json = {name: [] for name in choice["logprobs"]}
            for token_id, logprobs in scored:
                entry = self._entry(texts, token_id, logprobs)
                for name, values in entry.items():
                    before[name] += values
            offsets = [len(text) + offset for offset in choice["logprobs"]["text_offset"]]
            after = choice["logprobs"] | {"text_offset": offsets}
            choice["logprobs"] = {name: before[name] + after[name] for name in before}
        choice["text"] = text + choice["text"]

    @staticmethod
    def _entry(texts: _TokenTexts, token_id: int, logprobs: TokenLogprobs | None) -> Json:
        """The entries of a token, which it adds to the texts."""
        top = {} if logprobs is None else logprobs.top
        names = texts.names([token_id, *(other for other in top if other != token_id)])
        offset = texts.num_characters
        texts.add(token_id)
        return {
            "tokens": [names[token_id]],
            "token_logprobs": [None if logprobs is None else logprobs.logprob],
            "top_logprobs": [None if logprobs is None else {names[other]: value for other, value in top.items()}],
            "text_offset": [offset],
        }

    def _part(self, chunk: Chunk) -> Json:
        finish_reason = chunk.output.finish_reason if chunk.output else None
        part: Json = {"text": chunk.text, "logprobs": None, "finish_reason": finish_reason}
        if chunk.logprobs is not None:
            part["logprobs"] = entry = self._entry(self._texts[chunk.index], chunk.token_id, chunk.logprobs)
            if chunk.output is not None:
                entry["text_offset"] = [min(entry["text_offset"][0], len(chunk.output.text))]
        return part

    def _join(self, parts: Sequence[Json]) -> Json:
        logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        text = "".join(part["text"] for part in parts)
        if not logprobs:
            return {"text": text, "logprobs": None}
        joined = {name: [item for lists in logprobs for item in lists[name]] for name in logprobs[0]}
        # A stop string may have taken the text of the last tokens.
        joined["text_offset"] = [min(offset, len(text)) for offset in joined["text_offset"]]
        return {"text": text, "logprobs": joined}


class InfillEvents(Events):
    """Events of what is filled in, by llama-server's names: the text of a chunk, in the last one also the figures."""

    def __init__(self, model: str) -> None:
        self._model = model

    def events(self, chunk: Chunk) -> list[Json]:
        event: Json = {"content": chunk.text, "stop": chunk.output is not None}
        if chunk.output is not None:
            event |= self._figures(chunk.output, chunk.token_id)
        return [event]

    def fold(self, events: Iterable[Json]) -> Json:
        parts = list(events)
        return parts[-1] | {"content": "".join(part["content"] for part in parts)}

    def _figures(self, output: Output, last_id: int) -> Json:
        is_eos = output.finish_reason == "stop" and last_id not in output.token_ids[-1:]
        rate = output.tokens_per_second
        timings = {"prompt_n": output.prompt_tokens - output.cached_tokens, "prompt_ms": 1000 * output.ttft_s}
        timings |= {"predicted_n": output.completion_tokens, "predicted_per_second": rate}
        timings["predicted_ms"] = 1000 * output.completion_tokens / rate if rate else 0.0
        if output.drafted_tokens:
            timings |= {"draft_n": output.drafted_tokens, "draft_n_accepted": output.accepted_tokens}
        return {
            "model": self._model,
            "tokens_predicted": output.completion_tokens,
            "tokens_evaluated": output.prompt_tokens,
            "tokens_cached": output.cached_tokens,
            "stop_type": "limit" if output.finish_reason == "length" else "eos" if is_eos else "word",
            "timings": timings,
        }


class _TokenTexts:
    """The tokens of an output as its log-probabilities show them: their bytes and names, and their places in its text.

    `goes_on` says whether the text goes on from that of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, goes_on: bool) -> None:
        self._tokenizer, self._has_begun = tokenizer, goes_on
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_characters = 0  # that are complete

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token would add next."""
        return self._tokenizer.token_bytes(token_id, begins=not self._has_begun)

    def add(self, token_id: int) -> None:
        """Add a token; control tokens are no part of the text."""
        if token_id not in self._tokenizer.special_tokens:
            self.num_characters += len(self._decoder.decode(self.bytes_of(token_id)))
            self._has_begun = True

    def names(self, token_ids: Iterable[int]) -> dict[int, str]:
        """A different name for each token that could come next: its text, else its bytes, else its id."""
        names: dict[int, str] = {}
        for token_id in token_ids:
            data = self.bytes_of(token_id)
            candidates = (_token_name(data), _escaped(data), f"token_id:{token_id}")
            names[token_id] = next(name for name in candidates if name not in names.values())
        return names


def _logprob(texts: _TokenTexts, token_id: int, logprob: float) -> Json:
    data = texts.bytes_of(token_id)
    return {"token": _token_name(data), "logprob": logprob, "bytes": list(data)}


def _token_name(data: bytes) -> str:
    """The text of a token's bytes; if they are not UTF-8, the bytes as OpenAI writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _escaped(data)


def _escaped(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
