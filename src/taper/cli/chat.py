"""`taper chat` and `taper run`: a conversation in a terminal, or of the lines that come on standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import REUSE, TaperError, did_you_mean
from ..models import model_name
from ..models.download import cache_folder
from ..models.files import without_mark
from ..server.neighbours import OTHER_NAMES
from .common import REUSE_OPTION, GroupedCommand, load, say
from .generate import (
    GROUPS,
    chosen_policy,
    drafting_of,
    follow,
    generate_text,
    generation_options,
    messages_of,
    report,
    sampling_of,
    thoughts_after,
)

if TYPE_CHECKING:
    from ..llm import LLM
    from ..models.tokenizer import Message
    from ..policy import DepthPolicy

_HELP = """\
/system TEXT   the system message from now on, "" for none; without TEXT, says which one it is
/policy NAME   the policy from now on, full for every layer; without NAME, says which one it is
/set parameter NAME VALUE   sampling from now on: temperature, top_p, top_k, min_p, seed, stop, ...
/reset         begin again; also /clear
/exit          end, as Ctrl-D does; also /bye
Alt-Enter begins a new line in a message, pasted text keeps its lines, and three quotes begin and end a long message."""
_ENDS, _QUOTES = ("/exit", "/quit", "/bye"), '"""'


@click.command(cls=GroupedCommand, groups=GROUPS)
@generation_options
@REUSE_OPTION
def chat(**options: Any) -> None:
    """Chat over several turns. /help lists the commands."""
    converse(options)


@click.command(cls=GroupedCommand, groups=GROUPS)
@click.argument("name", metavar="MODEL")
@click.argument("prompt", required=False)
@generation_options
def run(name: str, prompt: str | None, **options: Any) -> None:
    """Chat with MODEL, fetched if it is not here, or answer PROMPT."""
    if options["model"] is not None:
        raise click.UsageError("the model is given twice")
    options["model"] = name
    if prompt is None and sys.stdin.isatty():
        converse(options | {"reuse": REUSE[0]})
    else:
        generate_text(prompt, compare=False, as_json=False, options=options)


def converse(options: dict[str, Any]) -> None:
    """Chat with a model until its user ends it."""
    sampling = sampling_of(options)
    llm = load(options)
    if not llm.tokenizer.chat_template:
        raise TaperError(f"{llm.model} has no chat template, so it cannot chat", "use taper generate")
    conversation = Conversation(llm, chosen_policy(llm, options), options, sampling)
    say(f"{model_name(llm.model)}, {conversation.policy.label}; /help lists commands, /exit or Ctrl-D ends")
    for text, is_quoted in _messages():
        if text.strip() in _ENDS:
            return
        if text.startswith("/") and not is_quoted:
            conversation.command(text.strip())
        elif text.strip():
            conversation.turn(text)


class Conversation:
    """What was said so far, and how the model goes on: the options of `taper chat`."""

    def __init__(self, llm: LLM, policy: DepthPolicy, options: dict[str, Any], sampling: dict[str, Any]) -> None:
        self._llm, self.policy, self._options, self._sampling = llm, policy, options, sampling
        self._system: str | None = options["system"]
        self._messages: list[Message] = messages_of(self._system)
        self._params, self._drafting = llm.sampling_params(**sampling), drafting_of(llm, options)

    def turn(self, text: str) -> None:
        """Complete a turn; if that fails, the conversation stays as it was."""
        self._messages.append({"role": "user", "content": text})
        think, reuse = self._options["think"], self._options["reuse"]
        try:
            thoughts = thoughts_after(self._llm, self._llm.encode(self._messages, think=think))
            how: dict[str, Any] = {"policy": self.policy, "think": think, "reuse": reuse, "draft": self._drafting}
            stream = self._llm.stream(self._messages, self._params, **how)
            output, chunks = follow(stream, thoughts, self._options["show_depth"] and self.policy)
        except TaperError as error:
            self._messages.pop()
            say(f"{error}; /reset starts over")
            return
        click.echo()
        report(output, chunks, self._options["show_depth"])
        self._messages.append({"role": "assistant", "content": output.text})

    def command(self, line: str) -> None:
        """Run a command: a line that begins with a slash."""
        name, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            **dict.fromkeys(("/help", "/?"), lambda _: say(_HELP)),
            **dict.fromkeys(("/reset", "/clear"), lambda _: self._begin()),
            "/system": self._instruct,
            "/policy": self._choose,
            "/set": self._set,
        }
        if name in commands:
            commands[name](argument.strip())
        else:
            say(f"there is no command {name}; {did_you_mean(name, [*commands, *_ENDS]) or '/help lists them'}")

    def _begin(self) -> None:
        self._messages = messages_of(self._system)
        say("a new conversation" + (f", with the system message: {self._system}" if self._system else ""))

    def _instruct(self, text: str) -> None:
        if text:
            said = self._messages[len(messages_of(self._system)) :]
            self._system = text.strip('"').strip() or None
            self._messages = [*messages_of(self._system), *said]
        say(f"system message: {self._system}" if self._system else "no system message")

    def _set(self, line: str) -> None:
        what, _, rest = line.partition(" ")
        name, _, value = rest.strip().partition(" ")
        if what == "system":
            self._instruct(rest.strip())
        elif what != "parameter" or not value:
            say("write /set parameter NAME VALUE, or /set system TEXT")
        else:
            self._set_parameter(OTHER_NAMES.get(name, name), value.strip())

    def _set_parameter(self, name: str, text: str) -> None:
        value: Any = text.strip('"')
        if name != "stop":
            with suppress(ValueError):
                value = json.loads(text)
        try:
            params = self._llm.sampling_params(**self._sampling | {name: value})
        except (TaperError, TypeError) as error:
            say(str(error) if isinstance(error, TaperError) else f"there is no parameter {name}")
        else:
            self._sampling, self._params = self._sampling | {name: value}, params
            say(f"{name} {value}")

    def _choose(self, name: str) -> None:
        try:
            if name:
                self.policy = self._llm.resolve_policy(name)
        except TaperError as error:
            say(str(error))
        else:
            say(f"policy {self.policy.label}")


def _messages() -> Iterator[tuple[str, bool]]:
    """The messages of a user until the end of the chat, and whether each stood between three quotes."""
    streams = [sys.stdin, sys.stderr]
    if sys.platform == "win32":  # where the editor needs the console's own output
        streams.append(sys.stdout)
    ask = _editor() if all(stream.isatty() for stream in streams) else _plain
    while True:
        try:
            text = without_mark(ask("\n> "))
            is_quoted = text.startswith(_QUOTES)
            if is_quoted:
                text = text.removeprefix(_QUOTES)
                while not text.rstrip().endswith(_QUOTES):
                    text += "\n" + ask("... ")
                text = text.rstrip().removesuffix(_QUOTES).strip("\n")
            yield text, is_quoted
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError:
            raise TaperError("standard input is not UTF-8 text", "convert it to UTF-8") from None


def _plain(mark: str) -> str:
    print(mark, end="", file=sys.stderr, flush=True)
    return input()


def _editor() -> Callable[[str], str]:
    """A function that asks for a message on a terminal: with editing, several lines, and a history on disk."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    history: History = InMemoryHistory()
    path = cache_folder() / "chat_history"
    with suppress(OSError):  # a folder that cannot be written to must not end a chat
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, multiline=True, output=create_output(stdout=sys.stderr)
    )
    return session.prompt
