"""Chunks of outputs as OpenAI's events, and the JSON replies that these events add up to."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from ..errors import RequestError
from ..llm import Chunk, Output
from ..models.tokenizer import Tokenizer
from ..sampling import TokenLogprobs
from .protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    Depths,
    FunctionReply,
    LikelyToken,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    ToolCallReply,
    Usage,
)


class Events:
    """Makes the events of one request out of its chunks.

    Args:
        model: the name that clients know.
        tokenizer: the model's.
        count: outputs of the request.
        n: outputs of each prompt.
    """

    prefix = ""  # of the request's id

    def __init__(self, model: str, tokenizer: Tokenizer, count: int, n: int = 1) -> None:
        self._tokenizer, self._n = tokenizer, n
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._outputs: list[Output | None] = [None] * count
        self._num_chunks = [0] * count

    def of(self, chunk: Chunk) -> ChatChunk | TextCompletion:
        """The event of a chunk."""
        raise NotImplementedError

    def usage_event(self) -> BaseModel:
        """The event with the usage, once all outputs have finished."""
        raise NotImplementedError

    def fold(self, events: Sequence[Any]) -> BaseModel:
        """The reply that all events of a request add up to."""
        raise NotImplementedError

    def _usage(self) -> Usage:
        outputs = [output for output in self._outputs if output is not None]
        prompts = outputs[:: self._n]  # each counts once
        prompt_tokens = sum(output.prompt_tokens for output in prompts)
        completion_tokens = sum(output.completion_tokens for output in outputs)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(output.cached_tokens for output in prompts)),
        )

    def _depths(self, chunk: Chunk) -> Depths:
        """The depth of a chunk's token, unless it is the stop token; and what the last chunk tells of its output."""
        self._outputs[chunk.index] = output = chunk.output
        self._num_chunks[chunk.index] += 1
        fields: dict[str, Any] = {}
        if output is None or self._num_chunks[chunk.index] == output.completion_tokens:
            fields["depth"] = chunk.depth
        if output is not None:
            fields |= {
                "policy": output.policy.label,
                "num_hidden_layers": output.policy.num_hidden_layers,
                "mean_depth": output.mean_depth,
                "depths": output.depths,
                "ttft_s": output.ttft_s,
                "tokens_per_second": output.tokens_per_second,
            }
        return Depths(**fields)

    def _likely(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id])
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }


class ChatEvents(Events):
    """Of a chat completion; text becomes tool calls if the request has tools."""

    prefix = "chatcmpl"

    def __init__(self, *args: Any, tools: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        self._tools = [ToolCalls() if tools else None for _ in self._outputs]

    def of(self, chunk: Chunk) -> ChatChunk:
        """The event of a chunk."""
        index, is_last = chunk.index, chunk.output is not None
        delta = Delta(content=chunk.text)
        finish_reason: Any = chunk.output.finish_reason if chunk.output else None
        if (tools := self._tools[index]) is not None:
            first = tools.count
            delta.content, calls = tools.push(chunk.text, is_last)
            if calls:
                delta.tool_calls = [_call(first + number, *call) for number, call in enumerate(calls)]
            if is_last and tools.count and finish_reason == "stop":
                finish_reason = "tool_calls"
        if not self._num_chunks[index]:
            delta.role = "assistant"
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=finish_reason, taper=self._depths(chunk))
        if chunk.logprobs is not None:
            choice.logprobs = ChatLogprobs(content=[self._logprob(chunk.token_id, chunk.logprobs)], refusal=None)
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._head)

    def usage_event(self) -> ChatChunk:
        """The event with the usage."""
        return ChatChunk(object="chat.completion.chunk", choices=[], usage=self._usage(), **self._head)

    def fold(self, events: Sequence[ChatChunk]) -> ChatCompletion:
        """The reply that all events add up to."""
        choices = []
        for index in range(len(self._outputs)):
            parts = [event.choices[0] for event in events if event.choices[0].index == index]
            calls = [call for part in parts for call in part.delta.tool_calls or []]
            content = "".join(part.delta.content or "" for part in parts)
            message = ChatMessage(role="assistant", content=content or None if calls else content, refusal=None)
            if calls:
                message.tool_calls = [
                    ToolCallReply(id=call.id, type=call.type, function=call.function) for call in calls
                ]
            logprobs = [token for part in parts if part.logprobs for token in part.logprobs.content]
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=ChatLogprobs(content=logprobs, refusal=None) if logprobs else None,
                    finish_reason=parts[-1].finish_reason or "stop",
                    taper=_summary(parts[-1].taper),
                )
            )
        return ChatCompletion(object="chat.completion", choices=choices, usage=self._usage(), **self._head)

    def _logprob(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top = [LikelyToken(**self._likely(*pair)) for pair in logprobs.top.items()]
        return TokenLogprob(**self._likely(token_id, logprobs.logprob), top_logprobs=top)


class TextEvents(Events):
    """Of a text completion."""

    prefix = "cmpl"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._offsets = [0] * len(self._outputs)

    def of(self, chunk: Chunk) -> TextCompletion:
        """The event of a chunk."""
        finish_reason: Any = chunk.output.finish_reason if chunk.output else None
        choice = TextChoice(
            index=chunk.index,
            text=chunk.text,
            logprobs=None if chunk.logprobs is None else self._logprobs(chunk, chunk.logprobs),
            finish_reason=finish_reason,
            taper=self._depths(chunk),
        )
        return TextCompletion(object="text_completion", choices=[choice], **self._head)

    def usage_event(self) -> TextCompletion:
        """The event with the usage."""
        return TextCompletion(object="text_completion", choices=[], usage=self._usage(), **self._head)

    def fold(self, events: Sequence[TextCompletion]) -> TextCompletion:
        """The reply that all events add up to."""
        choices = []
        for index in range(len(self._outputs)):
            parts = [event.choices[0] for event in events if event.choices[0].index == index]
            choices.append(
                TextChoice(
                    index=index,
                    text="".join(part.text for part in parts),
                    logprobs=_join(part.logprobs for part in parts if part.logprobs),
                    finish_reason=parts[-1].finish_reason,
                    taper=_summary(parts[-1].taper),
                )
            )
        return TextCompletion(object="text_completion", choices=choices, usage=self._usage(), **self._head)

    def _logprobs(self, chunk: Chunk, logprobs: TokenLogprobs) -> TextLogprobs:
        token = self._tokenizer.decode([chunk.token_id])
        offset, self._offsets[chunk.index] = self._offsets[chunk.index], self._offsets[chunk.index] + len(token)
        top = {self._tokenizer.decode([token_id]): logprob for token_id, logprob in logprobs.top.items()}
        return TextLogprobs(tokens=[token], token_logprobs=[logprobs.logprob], top_logprobs=[top], text_offset=[offset])


def _call(index: int, name: str, arguments: str) -> ToolCallReply:
    function = FunctionReply(name=name, arguments=arguments)
    return ToolCallReply(index=index, id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=function)


def _summary(last: Depths | None) -> Depths:
    """What the last chunk tells of its output, without the depth of its own token."""
    assert last is not None
    return Depths(**last.model_dump(exclude_unset=True, exclude={"depth"}))


def _join(parts: Iterable[TextLogprobs]) -> TextLogprobs | None:
    """Log-probabilities of tokens, one after another."""
    lists = list(parts)
    if not lists:
        return None
    names = TextLogprobs.model_fields
    return TextLogprobs(**{name: [item for part in lists for item in getattr(part, name)] for name in names})


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def check_tools(tokenizer: Tokenizer) -> None:
    """Check that a model's chat template takes tools, and in the form that is read here.

    Raises:
        RequestError: it does not.
    """
    if not tokenizer.takes_tools:
        raise RequestError("this model's chat template takes no tools", "leave out tools, or serve another model")
    if _OPEN not in tokenizer.chat_template:
        raise RequestError(f"this model's chat template asks for tool calls in another form than {_OPEN}")


class ToolCalls:
    """Separates the text of one completion, as it comes, into what is said and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False  # nothing was said since
        self.count = 0

    def push(self, text: str, last: bool) -> tuple[str, list[tuple[str, str]]]:
        """The text that is certain to be no call, and the calls that have ended: name and arguments as JSON text.

        With the `last` text, what is left of a call that never ended is given out as the text that it is.
        """
        self._held += text
        if self._after_call:
            self._held = self._held.lstrip("\n")
        said, calls = "", []
        while (begin := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, begin)
            if end < 0:
                break
            call = _read_call(self._held[begin + len(_OPEN) : end])
            end += len(_CLOSE)
            said += self._held[:begin].rstrip("\n") if call else self._held[:end]
            calls += [call] if call else []
            self._held = self._held[end:].lstrip("\n") if call else self._held[end:]
            self._after_call = call is not None
        if last:
            certain = len(self._held)
        elif begin >= 0:  # a call that has not ended, and the line breaks before it
            certain = len(self._held[:begin].rstrip("\n"))
        else:
            certain = len(self._held) - self._overlap()
        said, self._held = said + self._held[:certain], self._held[certain:]
        self._after_call &= not certain
        self.count += len(calls)
        return said, calls

    def _overlap(self) -> int:
        """How many last characters may be the beginning of a call, with the line breaks before it."""
        text = self._held
        size = next((size for size in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:size])), 0)
        before = text[: len(text) - size]
        return size + len(before) - len(before.rstrip("\n"))


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None if it is not one."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
