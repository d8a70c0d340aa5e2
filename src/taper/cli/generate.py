"""`taper generate` and `taper chat`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import MODES, REUSE, TaperError
from ..models.files import decode_text, without_mark
from .common import INTERRUPTED, Command, load, model_options, say, with_options

if TYPE_CHECKING:
    from ..llm import LLM, Chunk, Output, Stream
    from ..models.tokenizer import Message
    from ..policy import DepthPolicy
    from ..sampling import SamplingParams
    from .terminal import Thoughts

_PROMPT_END = 8  # tokens of a prompt that may begin a thought


def _options(command: Command) -> Command:
    """What `generate` and `chat` share."""
    options = [
        click.option("--policy", metavar="NAME|FILE", help="A shipped policy or a JSON file. Default: balanced."),
        click.option("--mode", type=click.Choice(MODES), help="All layers, or fewer as the output grows."),
        click.option("--alpha", type=float, help="Use D3's curve, floor(L * alpha^i) layers at step i; in (0, 1]."),
        click.option("--system", metavar="TEXT", help="System message."),
        click.option("--max-tokens", type=int, default=512, help="Most tokens to generate."),
        click.option("--temperature", type=float, default=0.0, help="0 takes the likeliest token."),
        click.option(
            "--top-p", type=float, default=1.0, help="Keep the likeliest tokens whose probabilities reach this sum."
        ),
        click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0: all."),
        click.option(
            "--min-p", type=float, default=0.0, help="Keep tokens at least this likely, relative to the likeliest."
        ),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the output before this text; repeatable."),
        click.option("--seed", type=int, help="Make sampling repeatable."),
        click.option("--think/--no-think", default=None, help="Have a thinking model think first, or not."),
        click.option("--show-depth", is_flag=True, help="Draw the depth of each step, and colour tokens by depth."),
    ]
    return with_options(options, model_options(command))


@click.command()
@click.argument("prompt")
@_options
@click.option("--compare", is_flag=True, help="Generate at full depth and tapered, side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def generate(prompt: str, compare: bool, as_json: bool, **options: Any) -> None:
    """Generate text for PROMPT; - reads the prompt from standard input."""
    if compare and options["mode"] == "full":
        raise click.UsageError("--compare shows both modes; leave out --mode full")
    if as_json and options["show_depth"]:
        raise click.UsageError("--show-depth draws pictures and --json has none; leave out one of them")
    params = _sampling(options)
    text = _read_prompt(prompt)
    llm = load(options)
    given = _prompt(llm, text, options["system"])
    # A prompt that does not fit is refused before anything else is said.
    thinks = _thinks(llm, llm.encode(given, think=options["think"]))
    policy = _policy(llm, options)
    if compare:
        _compare(llm, given, params, policy, options, as_json)
        return
    stream = llm.stream(given, params, policy=policy, think=options["think"])
    output, chunks = _follow(stream, thinks, echo=not as_json)
    if as_json:
        click.echo(json.dumps(_as_json(output, llm), ensure_ascii=False))
    else:
        click.echo()
        _report(output, chunks, options["show_depth"])
    if output.finish_reason == "abort":
        sys.exit(INTERRUPTED)


@click.command()
@_options
@click.option("--reuse", type=click.Choice(REUSE), default=REUSE[0], help="Of earlier turns: see docs/reliability.md.")
def chat(**options: Any) -> None:
    """Chat over several turns. /reset starts over, /exit or Ctrl-D ends the chat."""
    params = _sampling(options)
    llm = load(options)
    if not llm.tokenizer.chat_template:
        raise TaperError(f"{llm.model} has no chat template, so it cannot chat", "use taper generate")
    policy = _policy(llm, options)
    messages = _messages(options["system"])
    say("/reset starts over, /exit or Ctrl-D ends")
    while (line := _ask()) is not None:
        if line.strip() in ("/exit", "/quit"):
            return
        if line.strip() == "/reset":
            messages = _messages(options["system"])
        elif line.strip():
            messages.append({"role": "user", "content": line})
            try:
                thinks = _thinks(llm, llm.encode(messages, think=options["think"]))
                how = {"think": options["think"], "reuse": options["reuse"]}
                output, chunks = _follow(llm.stream(messages, params, policy=policy, **how), thinks, echo=True)
            except TaperError as error:
                messages.pop()
                say(f"{error}; /reset starts over")
                continue
            click.echo()
            _report(output, chunks, options["show_depth"])
            messages.append({"role": "assistant", "content": output.text})


def _sampling(options: dict[str, Any]) -> SamplingParams:
    from ..sampling import SamplingParams

    if options["temperature"] == 0:
        for name, unset in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("seed", None)):
            if options[name] != unset:
                option, hint = "--" + name.replace("_", "-"), "give a --temperature above 0, or leave it out"
                raise TaperError(f"{option} does nothing at temperature 0", hint)
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed")
    return SamplingParams(**{name: options[name] for name in names})


def _policy(llm: LLM, options: dict[str, Any]) -> DepthPolicy:
    """The policy that --policy, --mode and --alpha ask for together."""
    from ..llm import DEFAULT_POLICY
    from ..policy import DepthPolicy

    name, mode, alpha = options["policy"], options["mode"], options["alpha"]
    if alpha is None:
        return llm.resolve_policy(name, mode)
    if mode == "full":
        raise TaperError("--mode full runs every layer; --alpha does nothing there", "leave out one of the two")
    if name is not None:
        return llm.resolve_policy(name, mode).with_alpha(alpha)
    if DEFAULT_POLICY not in llm.shipped_policies():
        policy = DepthPolicy.middle_first(llm.config.num_hidden_layers, alpha)  # rejects a wrong alpha first
        say("taper: no measured skip order for this model: the middle layers go first (our reading of the paper)")
        return policy
    return llm.resolve_policy().with_alpha(alpha)


def _messages(system: str | None) -> list[Message]:
    return [{"role": "system", "content": without_mark(system)}] if system else []


def _prompt(llm: LLM, text: str, system: str | None) -> Any:
    """Messages for a model with a chat template, else the text alone."""
    if llm.tokenizer.chat_template:
        return [*_messages(system), {"role": "user", "content": text}]
    if system:
        raise TaperError(f"{llm.model} has no chat template, so --system does nothing", "leave it out")
    return text


def _thinks(llm: LLM, prompt_ids: list[int]) -> Thoughts:
    """Separates the thoughts of an output; some templates end a prompt with the beginning of a thought."""
    from .terminal import Thoughts

    thoughts = Thoughts()
    thoughts.take(llm.tokenizer.decode(prompt_ids[-_PROMPT_END:]))
    return thoughts


def _follow(stream: Stream, thoughts: Thoughts, echo: bool) -> tuple[Output, list[Chunk]]:
    """Take all chunks of an output, writing their text as it comes, thoughts dimmed; Ctrl-C ends it where it is."""
    from .terminal import console, dimmed, without_controls

    chunks: list[Chunk] = []
    is_terminal = sys.stdout.isatty()

    def take(chunk: Chunk) -> None:
        chunks.append(chunk)
        if not echo:
            return
        text = without_controls(chunk.text) if is_terminal else chunk.text
        print(dimmed(text) if thoughts.take(chunk.text) and is_terminal else text, end="", flush=True)

    try:
        with console().status("reading the prompt"):
            first = next(stream)
        take(first)
        for chunk in stream:
            take(chunk)
    except KeyboardInterrupt:
        for chunk in stream.abort():
            take(chunk)
    output = chunks[-1].output
    assert output is not None
    return output, chunks


def _compare(
    llm: LLM, prompt: Any, params: SamplingParams, policy: DepthPolicy, options: dict[str, Any], as_json: bool
) -> None:
    """Complete at full depth and under a policy, a token of each in turn: what slows the machine slows both alike."""
    from rich.live import Live

    from ..sampling import SamplingParams
    from .terminal import SideBySide, console, depth_chart

    layers, full = llm.config.num_hidden_layers, llm.resolve_policy(mode="full")
    llm.generate("warm up", SamplingParams(max_tokens=4), policy=full, raw=True)
    picture = SideBySide({"full": f"full depth, {layers} layers", "taper": f"tapered, {policy.label}"})
    policies = {"full": full, "taper": policy}
    running = {mode: llm.stream(prompt, params, policy=policies[mode], think=options["think"]) for mode in policies}
    with nullcontext() if as_json else Live(picture, console=console(), refresh_per_second=8, transient=True):
        try:
            while running:
                for mode, stream in list(running.items()):
                    picture.add(mode, next(stream))
                    if mode in picture.outputs:
                        del running[mode]
        except KeyboardInterrupt:
            for mode, stream in running.items():
                for chunk in stream.abort():
                    picture.add(mode, chunk)
    outputs = {mode: picture.outputs[mode] for mode in policies if mode in picture.outputs}
    if as_json:
        click.echo(json.dumps({mode: _as_json(output, llm) for mode, output in outputs.items()}, ensure_ascii=False))
    else:
        console(stderr=False).print(picture)
        say(picture.verdict())
    if options["show_depth"] and "taper" in outputs:
        say(depth_chart(outputs["taper"].depths, layers))
    if any(output.finish_reason == "abort" for output in outputs.values()):
        sys.exit(INTERRUPTED)


def _as_json(output: Output, llm: LLM) -> dict[str, Any]:
    return {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "num_hidden_layers": llm.config.num_hidden_layers,
        "mean_depth": output.mean_depth,
        "depths": output.depths,
        "ttft_s": output.ttft_s,
        "tokens_per_second": output.tokens_per_second,
        "mode": "full" if output.policy.min_depth == llm.config.num_hidden_layers else "taper",
        "policy": output.policy.label,
        "model": llm.model,
    }


def _report(output: Output, chunks: list[Chunk], show_depth: bool) -> None:
    from .terminal import coloured_tokens, console, depth_chart, summary

    screen = console()
    if show_depth:
        layers = output.policy.num_hidden_layers
        screen.print(depth_chart(output.depths, layers))
        screen.print(coloured_tokens(chunks, layers))
    screen.print(summary(output), style="dim", soft_wrap=True)


def _read_prompt(prompt: str) -> str:
    if prompt == "-":
        text = decode_text(sys.stdin.buffer.read(), "standard input")
        prompt = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text  # that of the last line
    prompt = without_mark(prompt)  # as from $(cat FILE)
    if not prompt.strip():
        raise TaperError("the prompt is empty", "give some text")
    return prompt


def _ask() -> str | None:
    """The next line of a chat; None at its end."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input its line editing and history)
    try:
        print("\n> ", end="", file=sys.stderr, flush=True)
        return without_mark(input())
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError:
        raise TaperError("standard input is not UTF-8 text", "convert it to UTF-8") from None
