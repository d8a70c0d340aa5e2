"""`taper chat` and `taper run`: a conversation in a terminal, or of the lines that come on standard input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import REUSE, TaperError, did_you_mean
from ..models import model_name
from ..models.download import cache_folder
from ..models.files import without_mark
from .common import load, say
from .generate import (
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
/system TEXT   begin again with this system message; without TEXT, without one
/policy NAME   the policy from now on, full for every layer; without NAME, says which one it is
/reset         begin again
/exit          end, as Ctrl-D does
Alt-Enter begins a new line in a message; pasted text keeps its lines."""


@click.command()
@generation_options
@click.option("--reuse", type=click.Choice(REUSE), default=REUSE[0], help="Of earlier turns: see docs/guide.md#chat.")
def chat(**options: Any) -> None:
    """Chat over several turns. /help lists the commands."""
    converse(options)


@click.command()
@click.argument("name", metavar="MODEL")
@click.argument("prompt", required=False)
@generation_options
def run(name: str, prompt: str | None, **options: Any) -> None:
    """Fetch MODEL if it is not here yet, and chat with it, or answer PROMPT."""
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
    conversation = Conversation(llm, chosen_policy(llm, options), options | {"sampling": sampling})
    say(f"{model_name(llm.model)}, {conversation.policy.label}; /help lists commands, /exit or Ctrl-D ends")
    for line in _lines():
        if line.strip() in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            conversation.command(line.strip())
        elif line.strip():
            conversation.turn(line)


class Conversation:
    """What was said so far, and how the model goes on: the options of `taper chat`."""

    def __init__(self, llm: LLM, policy: DepthPolicy, options: dict[str, Any]) -> None:
        self._llm, self.policy, self._options = llm, policy, options
        self._system: str | None = options["system"]
        self._messages: list[Message] = messages_of(self._system)
        self._params, self._drafting = llm.sampling_params(**options["sampling"]), drafting_of(llm, options)

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
            "/help": lambda _: say(_HELP),
            "/reset": lambda _: self._begin(self._system),
            "/system": lambda text: self._begin(text or None),
            "/policy": self._choose,
        }
        if name in commands:
            commands[name](argument.strip())
        else:
            say(f"there is no command {name}; {did_you_mean(name, [*commands, '/exit']) or '/help lists them'}")

    def _begin(self, system: str | None) -> None:
        self._system, self._messages = system, messages_of(system)
        say("a new conversation" + (f", with the system message: {system}" if system else ""))

    def _choose(self, name: str) -> None:
        try:
            if name:
                self.policy = self._llm.resolve_policy(name)
        except TaperError as error:
            say(str(error))
        else:
            say(f"policy {self.policy.label}")


def _lines() -> Iterator[str]:
    """The messages of a user, until the end of the chat."""
    ask = _editor() if sys.stdin.isatty() and sys.stderr.isatty() else _plain
    while True:
        try:
            yield without_mark(ask())
        except (EOFError, KeyboardInterrupt):
            return
        except UnicodeDecodeError:
            raise TaperError("standard input is not UTF-8 text", "convert it to UTF-8") from None


def _plain() -> str:
    print("\n> ", end="", file=sys.stderr, flush=True)
    return input()


def _editor() -> Callable[[], str]:
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
    return lambda: session.prompt("\n> ")
