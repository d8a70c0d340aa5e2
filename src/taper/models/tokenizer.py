"""Turns text and conversations into token ids, and token ids into text. Knows no file format."""

from __future__ import annotations

import codecs
import json
import os
import re
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from functools import cached_property
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from ..errors import ModelError, RequestError, TaperError
from .call_forms import OPEN
from .channels import (
    CHANNEL,
    THINK,
    THINK_END,
    THOUGHT,
    THOUGHT_END,
    ChannelText,
    ThoughtText,
    with_channels,
    without_thoughts,
)
from .chat_template import ChatTemplate
from .tool_texts import as_texts

Message = dict[str, Any]  # role and content are text; other fields are JSON for the chat template

MAX_NESTING = 32  # of lists and objects in messages and tools
_THINKING = ("enable_thinking", "thinking")  # the switch in templates of Qwen and SmolLM, and of Granite
_EFFORT, EFFORTS = "reasoning_effort", ("low", "medium", "high")  # in templates of gpt-oss
_MARK, _END_MARK = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which no text contains
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_IN_BRACKETS = re.compile("<.*>", re.DOTALL)
_NO_OUTPUTS: Mapping[str, Sequence[int]] = {}
_PROMPT_END = 8  # tokens of a prompt that may begin a thought
_CONTEXT = 8  # ids before a text that decide how it begins
# The bytes of the characters in byte-level vocabularies, as in GPT-2's: printable ones stand for themselves.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        fast: the `tokenizers` pipeline.
        eos_token_ids: ids that end a completion.
        chat_template: jinja2 source, "" where the model has none.
        template_tokens: special tokens by the names templates use (`bos_token`, `eos_token`).
        declared_eos_token_ids: those of `eos_token_ids` that the model's files declare; default: all.
        tool_template: the template of conversations with tools, where the model has one for these.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        eos_token_ids: frozenset[int],
        chat_template: str,
        template_tokens: dict[str, str],
        declared_eos_token_ids: frozenset[int] | None = None,
        tool_template: str = "",
    ) -> None:
        self.fast = fast
        self.eos_token_ids = eos_token_ids
        self.declared_eos_token_ids = eos_token_ids if declared_eos_token_ids is None else declared_eos_token_ids
        self.chat_template, self.tool_template = chat_template, tool_template or chat_template
        self._template = ChatTemplate(chat_template)
        self._tool_template = ChatTemplate(tool_template) if tool_template else self._template
        self.template_tokens = template_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's leading tokens (BOS) if it has them.

        Raises:
            RequestError: the text is not valid Unicode, or the tokenizer fails on it.
        """
        with library_errors(RequestError, "the model's tokenizer cannot encode this text"):
            try:
                ids: list[int] = self.fast.encode(text, add_special_tokens=add_special_tokens).ids
            except TypeError:  # the library's error for lone surrogates
                raise RequestError("the prompt is not valid Unicode text", "give it as UTF-8") from None
        return ids

    def encode_messages(
        self,
        messages: Sequence[Message],
        parse_special: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        outputs: Mapping[str, Sequence[int]] = _NO_OUTPUTS,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; `options` are those of `render`.

        Tools that the template does not know, in the form of calls that we read, become texts of the messages.

        Only the template makes control tokens. Unless `parse_special`, one that a message or a tool spells out is text.
        `outputs` maps texts that the model has generated to their tokens, which these texts keep.

        Raises:
            RequestError: as `render` and `encode`.
        """
        texts = texts_of([*messages, *tools])
        if self.has_channels:
            messages = with_channels(messages)
        elif self.thought_tokens:
            messages = without_thoughts(messages)
        if not self.has_channels and OPEN not in self.tool_template and (tools or any(map(_has_calls, messages))):
            messages, tools = as_texts(messages, tools), ()
        spelled = any(token in text for token in self.special_tokens.values() for text in texts)
        if parse_special or not (spelled or self._normalises_special):
            contents = [message["content"] for message in messages if message["role"] == "assistant"]
            known = {text: ids for text in contents if (ids := outputs.get(text))}
            return self._encode_with(known, self.render(messages, tools, **options))

        def guarded(value: Any) -> Any:
            if isinstance(value, str):
                value = _guarded(value, self.special_tokens.values())
            elif isinstance(value, list):
                value = [guarded(item) for item in value]
            elif isinstance(value, dict):
                value = {guarded(key): guarded(item) for key, item in value.items()}
            return value

        rendered = self.render(guarded(list(messages)), guarded(list(tools)), **options)
        return self._unmarking.encode(rendered, add_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which nothing stands for a control token, nor for an added one in angle brackets.

        Raises:
            RequestError: as `encode`.
        """
        guarded = _guarded(text, self._control_texts)
        if guarded == text and not self._normalises_special:
            return self.encode(text, add_special_tokens=False)
        return self._unmarking.encode(guarded, add_special_tokens=False)

    def _encode_with(self, outputs: Mapping[str, Sequence[int]], rendered: str) -> list[int]:
        """Token ids of a text that contains these outputs, in this order."""
        plain = self.encode(rendered, add_special_tokens=False)
        if not outputs:
            return plain
        ids, end = [], 0
        for text, output_ids in outputs.items():
            start = rendered.find(text, end)
            if start >= 0:
                ids += [*self.encode(rendered[end:start], add_special_tokens=False), *output_ids]
                end = start + len(text)
        ids += self.encode(rendered[end:], add_special_tokens=False)
        return ids if end and self.decode(ids) == self.decode(plain) else plain

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template uses tools."""
        return "tools" in self._tool_template.variables

    @property
    def takes_effort(self) -> bool:
        """Whether the chat template can be told how much to think."""
        return _EFFORT in self._template.variables

    @property
    def thinks(self) -> bool:
        """Whether the chat template supports thoughts."""
        tags = THINK in self.chat_template or self.has_channels or self.thought_tokens
        return bool(tags) or any(name in self._template.variables for name in _THINKING)

    @cached_property
    def has_channels(self) -> bool:
        """Whether outputs are messages in channels, as `channels` explains."""
        return CHANNEL in self.chat_template and CHANNEL in self.special_tokens.values()

    @cached_property
    def thought_tokens(self) -> dict[int, str]:
        """The tokens around thoughts in outputs that are no messages in channels, as `channels` explains."""
        tokens = {
            i: token.content for i, token in self._added_tokens.items() if token.content in (THOUGHT, THOUGHT_END)
        }
        return tokens if len(tokens) == 2 and THOUGHT in self.chat_template else {}

    def text_stream(self, before: Sequence[int] | None) -> TextStream | ChannelStream:
        """What makes the text of an output; `before` are ids that it continues, None if it is a message of its own."""
        in_parts = before is None and (self.has_channels or self.thought_tokens)
        return ChannelStream(self) if in_parts else TextStream(self, before or ())

    def ends_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of a thought, as some chat templates make it."""
        end = self.decode(prompt_ids[-_PROMPT_END:])
        return end.rfind(THINK) > end.rfind(THINK_END)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The control tokens by id."""
        return {i: token.content for i, token in self._added_tokens.items() if token.special}

    @cached_property
    def added_token_ids(self) -> dict[str, int]:
        """The ids of tokens that were added to the vocabulary, control tokens among them, by their text."""
        return {token.content: i for i, token in self._added_tokens.items()}

    @cached_property
    def _control_texts(self) -> list[str]:
        """The texts of control tokens, and of other added tokens in angle brackets, which have a meaning as well."""
        tokens = self._added_tokens.values()
        return [token.content for token in tokens if token.special or _IN_BRACKETS.fullmatch(token.content)]

    @cached_property
    def _added_tokens(self) -> dict[int, Any]:
        return dict(self.fast.get_added_tokens_decoder())

    @cached_property
    def _normalises_special(self) -> bool:
        """Whether other characters, such as wide ones, can spell a control token too."""
        return any(token.special and token.normalized for token in self._added_tokens.values())

    @cached_property
    def _unmarking(self) -> Tokenizer:
        """The same pipeline, with a first step that removes marks from the text around control tokens."""
        data = json.loads(self.fast.to_str())
        for token in data["added_tokens"]:
            token["normalized"] = token["normalized"] and token["content"] not in self._control_texts
        unmark = {"type": "Replace", "pattern": {"String": _MARK}, "content": ""}
        steps = [unmark, data["normalizer"]] if data["normalizer"] else [unmark]
        data["normalizer"] = {"type": "Sequence", "normalizers": steps}
        return Tokenizer(FastTokenizer.from_str(json.dumps(data)), self.eos_token_ids, "", {})

    @property
    def without_control_texts(self) -> str:
        """The pipeline as JSON, in which no text spells a control token or one in angle brackets: these have a mark.

        For libraries that take such a token where a text spells it, even inside of JSON.
        """
        pipeline: str = self.fast.to_str()
        for text in self._control_texts:
            name, marked = (json.dumps(one, ensure_ascii=False) for one in (text, _marked(text)))
            pipeline = pipeline.replace(name, marked)
        return pipeline

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens. Bytes that are no character become U+FFFD.

        Raises:
            ModelError: the tokenizer fails on them.
        """
        with library_errors(ModelError, "the model's tokenizer cannot decode its tokens", "its files are damaged"):
            text: str = self.fast.decode(list(ids), skip_special_tokens=True)
            if "\ufffd" not in text or not self._has_bytes or not self.fast.decoder:
                return text
            # For one bad byte, the library replaces its whole run of byte tokens; this keeps the run's good characters.
            pieces = (self.fast.id_to_token(i) for i in ids if i not in self.special_tokens)
            known, joined = [piece for piece in pieces if piece is not None], []
            for is_byte, group in groupby(known, lambda piece: bool(_BYTE_PIECE.fullmatch(piece))):
                run = list(group)
                joined += [bytes(int(piece[3:5], 16) for piece in run).decode(errors="replace")] if is_byte else run
            return str(self.fast.decoder.decode(joined))

    def token_bytes(self, token_id: int, begins: bool = False) -> bytes:
        """The bytes that a token adds to a text, or to an empty one if it `begins`; a control token's are its name."""
        if (special := self.special_tokens.get(token_id)) is not None:
            return special.encode()
        piece = self.fast.id_to_token(token_id)
        if piece is None:
            return b""
        if self._has_bytes and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        if self._is_byte_level and token_id not in self._added_tokens:
            with suppress(KeyError):
                return bytes(_BYTES[character] for character in piece)
        context = [] if begins else self._letter
        return self.decode([*context, token_id])[len(self.decode(context)) :].encode()

    def ends_within_a_character(self, ids: Sequence[int]) -> bool:
        """Whether the last of these tokens are bytes that begin a character and do not complete it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in ids:
            decoder.decode(b"" if token_id in self.special_tokens else self.token_bytes(token_id))
        return bool(decoder.getstate()[0])

    @cached_property
    def _is_byte_level(self) -> bool:
        return self.fast.decoder is not None and b'"ByteLevel"' in self.fast.decoder.__getstate__()

    @property
    def _has_bytes(self) -> bool:
        return bool(getattr(self.fast.model, "byte_fallback", False))

    @cached_property
    def _letter(self) -> list[int]:
        """A token of plain text, after which others are decoded as they are inside a text."""
        return self.encode("a", add_special_tokens=False)[-1:]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        think: bool | str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
    ) -> str:
        """The prompt of a conversation, ready for the assistant's turn.

        Args:
            messages: the conversation.
            tools: functions that the model may call.
            think: turns the thoughts of a thinking model on or off, or says how much to think, as in `EFFORTS`; None
                leaves that to the template.
            add_generation_prompt: end with the beginning of the assistant's turn; None: unless continue_final_message.
            continue_final_message: end within the last message, so that the completion continues it.

        Raises:
            RequestError: there is no chat template, or it rejects these messages, has no switch for thinking or does
                not write the last message as it is; or the options contradict each other.
        """
        template = self._tool_template if tools else self._template
        if not template.source:
            raise RequestError("this model has no chat template", "give plain text instead of messages")
        if continue_final_message and add_generation_prompt:
            message = "a prompt cannot continue its last message and begin another one"
            hint = "leave out add_generation_prompt or continue_final_message"
            raise RequestError(message, hint, "add_generation_prompt")
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        # Missing values are None, as in transformers.
        values: dict[str, Any] = {"tools": list(tools) or None, "documents": None, "add_generation_prompt": begins}
        values |= {"messages": list(messages), **self.template_tokens}
        if think is not None and not (think is True and self.has_channels):  # these always think
            names = (_EFFORT,) if isinstance(think, str) else _THINKING
            switches = {name: think for name in names if name in template.variables}
            if not switches:
                message = "this model's chat template has no switch for thinking"
                raise RequestError(message, "leave it as it is", "think")
            values |= switches
        if not continue_final_message:
            return template.render(values)
        *earlier, last = messages
        values["messages"] = [*earlier, last | {"content": last["content"] + _END_MARK}]
        text, mark, _ = template.render(values).rpartition(_END_MARK)
        if not mark:
            message = "this model's chat template does not write the last message as it is"
            raise RequestError(message, "leave out continue_final_message", "continue_final_message")
        return text


class TextStream:
    """Turns ids into text as they arrive, in whole characters.

    The text of a token that holds only part of a character waits for the rest.

    Args:
        tokenizer: the model's.
        before: ids that the text continues. Some tokenizers drop a space at the beginning of a text, not inside it.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Ids of the last pieces of text, and of the text that is held back.
        self._ids = list(before[-_CONTEXT:])
        self._done = len(self._ids)  # how many of them were returned as text
        self._prefix = tokenizer.decode(self._ids)  # the text of these
        if tokenizer.ends_within_a_character(self._ids):
            self._prefix = self._prefix.rstrip("\ufffd")  # the first tokens complete it

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        self._ids = [*self._ids, token_id]  # a copy may have the same list
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") or len(text) <= len(self._prefix):
            return ""
        return self._emit(text)

    def flush(self, is_cut: bool = False) -> str:
        """The text that is held back at the end of an output, without an incomplete last character if `is_cut`."""
        text = self._tokenizer.decode(self._ids)
        if is_cut and text.endswith("\ufffd") and self._tokenizer.ends_within_a_character(self._ids):
            text = text.removesuffix("\ufffd")
        return self._emit(text)

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix) :]
        if len(self._ids) > _CONTEXT:
            self._ids = self._ids[self._done :]
            text = self._tokenizer.decode(self._ids)
        self._done, self._prefix = len(self._ids), text
        return new


class ChannelStream:
    """The same for an output that is messages in channels, or has thoughts in one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._text = tokenizer, TextStream(tokenizer)
        self._channels = ChannelText() if tokenizer.has_channels else ThoughtText()
        self._controls = tokenizer.special_tokens if tokenizer.has_channels else tokenizer.thought_tokens

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        control = self._controls.get(token_id)
        if control is None:
            return self._channels.push(self._text.push(token_id))
        text = self._channels.push(self._text.flush())
        self._text = TextStream(self._tokenizer)
        return text + self._channels.push_control(control)

    def copy(self) -> ChannelStream:
        """A stream of its own for the same output so far."""
        other = ChannelStream(self._tokenizer)
        other._text, other._channels = copy(self._text), copy(self._channels)
        return other

    def flush(self, is_cut: bool = False) -> str:
        """The text that is held back at the end of an output; without what its model did not come to if `is_cut`."""
        return self._channels.push(self._text.flush(is_cut)) + self._channels.flush(is_cut)


def _has_calls(message: Message) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def texts_of(messages: Sequence[Message]) -> list[str]:
    """All texts in messages or tools, including the names of fields; a RequestError if they are nested too deeply."""
    texts: list[str] = []
    stack: list[tuple[Any, int]] = [(message, 0) for message in messages]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, str):
            texts.append(value)
        elif depth > MAX_NESTING:
            raise RequestError(f"messages or tools are nested more than {MAX_NESTING} deep", "flatten them")
        elif isinstance(value, Mapping):
            stack += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            stack += [(item, depth + 1) for item in value]
    return texts


def _guarded(text: str, names: Collection[str]) -> str:
    """The text with a mark inside each of these tokens, which hides it until a normaliser removes the mark."""
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 1:
            text = text.replace(name, _marked(name))
    return text


def _marked(token: str) -> str:
    """The name of a token with a mark in it."""
    return token[:1] + _MARK + token[1:]


@contextmanager
def library_errors(error: type[TaperError], message: str, hint: str = "") -> Iterator[None]:
    """Turn whatever the library raises into an error of ours; our own errors and interrupts pass."""
    try:
        yield
    except (TaperError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as raised:  # a panic is not an Exception
        raise error(f"{message}: {str(raised) or type(raised).__name__}", hint) from None


_LOCK = threading.RLock()  # one thread at a time redirects standard error


@contextmanager
def loading_tokenizer(source: object) -> Iterator[None]:
    """Turn the library's failures into an error that names the file, and hide the lines that a panic prints.

    What this process writes to file descriptor 2 is held back, and written afterwards unless there was a panic. This
    delays other threads' lines too, so it is for loading only.
    """
    with library_errors(ModelError, f"{source}: the tokenizer is damaged"), _LOCK, ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile())
            standard_error = os.dup(2)
        except OSError:  # no folder for temporary files, or standard error is closed
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            held.seek(0)
            if (lines := held.read()) and b" panicked at " not in lines:
                os.write(2, lines)
