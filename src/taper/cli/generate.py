"""`taper generate`, and what it shares with `taper chat`."""

from __future__ import annotations

import json
import os
import secrets
import select
import stat
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ..errors import EXACT, MODES, OFF, TaperError
from ..models.files import decode_text, read_text, without_mark
from ..models.policies import FULL, measured_tokens
from .common import (
    DRAFT_LIMITS,
    INTERRUPTED,
    OF_MODELS,
    Command,
    GroupedCommand,
    draft_options,
    limits_of_drafts,
    load,
    model_options,
    say,
    say_why_full,
    with_options,
)

if TYPE_CHECKING:
    from ..engine.drafting import Drafting
    from ..llm import LLM
    from ..models.tokenizer import Message
    from ..policy import DepthPolicy
    from ..sampling import SamplingParams
    from ..stream import Chunk, Output, Stream
    from .terminal import Thoughts

MAX_SCHEMA_BYTES = 1 << 20
_PIPE_SECONDS = 1.0  # to wait for what a pipe puts before a prompt
GROUPS = {
    "Prompt and output": ("named_prompt", "system", "suffix", "max_tokens", "stop", "think", "schema", "as_json"),
    "Layers": ("policy", "mode", "alpha", "compare", "show_depth", "reuse"),
    "Model": OF_MODELS,
    "Sampling": ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    "Drafts": ("draft", *DRAFT_LIMITS, "exact_bits"),
}


def generation_options(command: Command) -> Command:
    """What `generate` and `chat` share."""
    options = [
        click.option("--policy", metavar="NAME|FILE", help="A shipped one or a file. Default: see taper policy list."),
        click.option(
            "--mode",
            type=click.Choice(MODES),
            help="All layers, fewer as the output grows, or exact: all layers, sooner where drafts come true.",
        ),
        click.option("--alpha", type=float, help="Use D3's curve, floor(L * alpha^i) layers at step i; in (0, 1]."),
        click.option("--system", metavar="TEXT", help="System message."),
        click.option("-n", "--max-tokens", type=int, default=512, help="Most tokens to generate."),
        click.option(
            "--temperature",
            "--temp",
            type=float,
            help="0 takes the likeliest token. Default, and of the four below: what the model's authors recommend.",
        ),
        click.option("--top-p", type=float, help="Keep the likeliest tokens whose probabilities reach this sum."),
        click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0: all."),
        click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest."),
        click.option("--repetition-penalty", type=float, help="Make tokens that have occurred less likely; 1: off."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the output before this text; repeatable."),
        click.option("-s", "--seed", type=int, help="Make sampling repeatable."),
        click.option("--think/--no-think", default=None, help="Have a thinking model think first, or not."),
        click.option("--show-depth", is_flag=True, help="Draw the depth of each step, and colour tokens by depth."),
    ]
    return with_options(options, draft_options(model_options(command)))


@click.command(cls=GroupedCommand, groups=GROUPS)
@click.argument("prompt", required=False)
@click.option("-p", "--prompt", "named_prompt", metavar="TEXT", help="PROMPT under another name.")
@generation_options
@click.option("--suffix", metavar="TEXT", help="Write what is missing between PROMPT and TEXT; models for code can.")
@click.option("--schema", type=Path, metavar="FILE", help="A JSON schema that the output has to keep.")
@click.option("--compare", is_flag=True, help="Generate at full depth and tapered, side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def generate(prompt: str | None, named_prompt: str | None, compare: bool, as_json: bool, **options: Any) -> None:
    """Generate text for PROMPT.

    Text from standard input is put before it; without PROMPT, or with -, it is the whole prompt.
    """
    if prompt is not None and named_prompt is not None:
        raise click.UsageError("the prompt is given twice")
    generate_text(named_prompt if prompt is None else prompt, compare, as_json, options)


def generate_text(argument: str | None, compare: bool, as_json: bool, options: dict[str, Any]) -> None:
    """What `taper generate` does, and `taper run` with a prompt as its argument."""
    if compare and options["mode"] == EXACT:
        raise click.UsageError("--compare shows full depth beside a policy, and exact gives what full depth gives")
    if compare and FULL in (options["mode"], options["policy"]):
        raise click.UsageError("--compare shows full depth beside a policy; leave out full")
    if as_json and options["show_depth"]:
        raise click.UsageError("--show-depth draws pictures and --json has none; leave out one of them")
    if compare and options["policy"] is options["mode"] is options["alpha"] is None:
        options["mode"] = "taper"
    if options.get("suffix") is not None and (options["system"] or options["think"] is not None):
        raise click.UsageError("--suffix goes without a chat: leave out --system and --think")
    sampling = sampling_of(options)
    more = {"response_format": _schema(options.get("schema")), "think": options["think"]}
    llm = load(options)
    text = _read_prompt("-" if argument is None else argument)
    params = llm.sampling_params(**sampling)
    prompt = _prompt(llm, text, options["system"])
    if (suffix := options.get("suffix")) is not None:
        prompt = llm.encode_infill(text, suffix)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *llm.infill_ends))
    # A prompt that does not fit is rejected before anything else is printed.
    thoughts = thoughts_after(llm, llm.encode(prompt, think=options["think"]))
    policy = chosen_policy(llm, options)
    more["draft"] = drafting_of(llm, options)
    if compare:
        _compare(llm, prompt, params, policy, more, options["show_depth"], as_json)
        return
    stream = llm.stream(prompt, params, policy=policy, **more)
    output, chunks = follow(stream, thoughts, options["show_depth"] and policy, echo=not as_json)
    if as_json:
        click.echo(json.dumps(_as_json(output, llm, params), ensure_ascii=False))
    else:
        click.echo()
        report(output, chunks, options["show_depth"])
    if output.finish_reason == "abort":
        sys.exit(INTERRUPTED)


def sampling_of(options: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that are given, checked."""
    from ..sampling import SamplingParams

    names = (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "stop", "seed"),
    )
    given = {name: options[name] for name in names if options[name] is not None}
    SamplingParams(**given)
    if options["temperature"] == 0:
        for name in ("top_p", "top_k", "min_p", "seed"):
            if name in given:
                option, hint = "--" + name.replace("_", "-"), "give a --temperature above 0, or leave it out"
                raise TaperError(f"{option} does nothing at temperature 0", hint)
    return given


def chosen_policy(llm: LLM, options: dict[str, Any]) -> DepthPolicy:
    """The policy that --policy, --mode and --alpha ask for together."""
    from ..policy import DepthPolicy

    name, mode, alpha = options["policy"], options["mode"], options["alpha"]
    if alpha is None:
        if name is None and mode is None:
            say_why_full(llm)
        return llm.resolve_policy(name, mode)
    if mode == EXACT or FULL in (mode, name):
        raise TaperError("full depth runs every layer; --alpha does nothing there", "leave out one of the two")
    if name is not None:
        return llm.resolve_policy(name, mode).with_alpha(alpha)
    if not llm.shipped_policies():
        policy = DepthPolicy.middle_first(llm.config.num_hidden_layers, alpha)  # rejects a wrong alpha first
        say("taper: no measured skip order for this model: the middle layers go first (our reading of the paper)")
        return policy
    return llm.resolve_policy(mode="taper").with_alpha(alpha)


def drafting_of(llm: LLM, options: dict[str, Any]) -> Drafting | None:
    """What the options of drafting ask for; those that do nothing are rejected."""
    given = [name for name in (*DRAFT_LIMITS, "exact_bits") if options[name] not in (None, False)]
    more = limits_of_drafts({name: options[name] for name in DRAFT_LIMITS}) | {"exact_bits": options["exact_bits"]}
    drafting = llm.resolve_drafting(options["draft"], options["mode"], options["policy"], **more)
    without = {"auto": (), "ngram": ("draft_p_min",), "policy": ("draft_min_match",)}
    idle = [name for name in given if drafting is None or name in without[drafting.kind]]
    if options["draft"] == OFF and idle == ["exact_bits"]:  # to compare outputs with drafts and without
        idle = []
    if idle:
        option = "--" + idle[0].replace("_", "-")
        raise TaperError(f"{option} does nothing here", "give --mode exact, or --draft of a kind that it is for")
    return drafting


def messages_of(system: str | None) -> list[Message]:
    """The messages that a conversation begins with."""
    return [{"role": "system", "content": without_mark(system)}] if system else []


def _prompt(llm: LLM, text: str, system: str | None) -> Any:
    """Messages for a model with a chat template, else the text alone."""
    if llm.tokenizer.chat_template:
        return [*messages_of(system), {"role": "user", "content": text}]
    if system:
        raise TaperError(f"{llm.model} has no chat template, so --system does nothing", "leave it out")
    return text


def _schema(path: Path | None) -> dict[str, Any] | None:
    """The JSON schema of a file."""
    if path is None:
        return None
    try:
        schema = json.loads(read_text(path, MAX_SCHEMA_BYTES))
    except (ValueError, RecursionError) as error:
        raise TaperError(f"{path} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise TaperError(f"{path} is not a JSON schema", 'a schema is an object, such as {"type": "object"}')
    return schema


def thoughts_after(llm: LLM, prompt_ids: list[int]) -> Thoughts:
    """Separates the thoughts of an output."""
    from .terminal import Thoughts

    return Thoughts(llm.tokenizer.ends_in_thought(prompt_ids))


def follow(
    stream: Stream, thoughts: Thoughts, coloured_by: DepthPolicy | Literal[False], echo: bool = True
) -> tuple[Output, list[Chunk]]:
    """Take all chunks of an output, writing their text as it comes; Ctrl-C ends it where it is.

    On a terminal, thoughts are dimmed, and tokens have the colour of their depth under a policy.
    """
    from .terminal import DepthColours, console, styled, without_controls

    chunks: list[Chunk] = []
    is_terminal = sys.stdout.isatty()
    colours = coloured_by and DepthColours(coloured_by.num_hidden_layers, coloured_by.min_depth)

    def take(chunk: Chunk) -> None:
        chunks.append(chunk)
        if not echo:
            return
        text, style = chunk.text, colours.style(chunk) if colours and chunk.depth else ""
        if thoughts.take(text):
            style = f"dim {style}"
        print(styled(without_controls(text), style) if is_terminal else text, end="", flush=True)

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
    llm: LLM,
    prompt: Any,
    params: SamplingParams,
    policy: DepthPolicy,
    more: dict[str, Any],
    show_depth: bool,
    as_json: bool,
) -> None:
    """Complete at full depth and under a policy, a token of each in turn: whatever slows the machine slows both."""
    from rich.live import Live

    from ..sampling import SamplingParams
    from .terminal import SideBySide, console, depth_chart

    layers, full = llm.config.num_hidden_layers, llm.resolve_policy(mode="full")
    llm.generate("warm up", SamplingParams(max_tokens=4), policy=full, raw=True)
    if params.seed is None:
        params = replace(params, seed=secrets.randbelow(1 << 32))  # one for both, so that only depth differs
    picture = SideBySide({"full": f"full depth, {layers} layers", "taper": f"tapered, {policy.label}"})
    policies = {"full": full, "taper": policy}
    running = {mode: llm.stream(prompt, params, policy=policies[mode], **more) for mode in policies}
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
        both = {mode: _as_json(output, llm, params) for mode, output in outputs.items()}
        click.echo(json.dumps(both, ensure_ascii=False))
    else:
        console(stderr=False).print(picture)
        say(picture.verdict())
    if show_depth and "taper" in outputs:
        say(depth_chart(outputs["taper"].depths, layers))
    if any(output.finish_reason == "abort" for output in outputs.values()):
        sys.exit(INTERRUPTED)


def _as_json(output: Output, llm: LLM, params: SamplingParams) -> dict[str, Any]:
    from ..models.tensors import RECOMMENDED

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
        "drafted_tokens": output.drafted_tokens,
        "accepted_tokens": output.accepted_tokens,
        "mode": "taper" if output.policy.tapers else "full",
        "policy": output.policy.label,
        "model": llm.model,
        "sampling": {name: getattr(params, name) for name in RECOMMENDED},
    }


def report(output: Output, chunks: list[Chunk], show_depth: bool) -> None:
    """Print the figures of an output on standard error, and draw its depths if asked to."""
    from .terminal import DepthColours, console, depth_chart, summary

    screen = console()
    if show_depth:
        layers = output.policy.num_hidden_layers
        colours = DepthColours(layers, output.policy.min_depth)
        screen.print(depth_chart(output.depths, layers))
        if not sys.stdout.isatty():  # else the text is there already
            screen.print(colours.text(chunks))
        screen.print(colours.legend(drafts=output.drafted_tokens > 0))
    screen.print(summary(output), style="dim", soft_wrap=True)
    measured, tokens = measured_tokens(output.policy), output.completion_tokens
    if output.policy.tapers and measured is not None and tokens > measured:
        say(f"policy {output.policy.label} was measured in outputs of up to {measured} tokens; this one has {tokens}")


def _has_input() -> bool:
    """Whether something comes on standard input, which may be an open pipe into which nobody writes."""
    if sys.stdin.isatty():
        return False
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
            return True
        if _comes_soon():
            return True
    except (OSError, ValueError):  # not a file, as in tests
        return True
    say("nothing comes on standard input, so it is left out; without a prompt, taper waits for it")
    return False


def _comes_soon() -> bool:
    """Whether something comes through the pipe on standard input within a second, be it its end."""
    if sys.platform != "win32":
        return bool(select.select([sys.stdin], [], [], _PIPE_SECONDS)[0])
    import ctypes
    import msvcrt

    handle, count = ctypes.c_void_p(msvcrt.get_osfhandle(sys.stdin.fileno())), ctypes.c_ulong()
    until = time.monotonic() + _PIPE_SECONDS
    while time.monotonic() < until:
        if not ctypes.windll.kernel32.PeekNamedPipe(handle, None, 0, None, ctypes.byref(count), None) or count.value:
            return True
        time.sleep(0.01)
    return False


def _read_prompt(prompt: str) -> str:
    """What comes on standard input, without the last line break, and then the prompt unless it is "-"."""
    text = ""
    if prompt == "-" and sys.stdin.isatty():
        say(f"type the prompt; {'Ctrl-Z and Enter end' if sys.platform == 'win32' else 'Ctrl-D ends'} it")
    if prompt == "-" or _has_input():
        text = decode_text(sys.stdin.buffer.read(), "standard input")
        text = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
    if prompt != "-":
        prompt = without_mark(prompt)  # as from $(cat FILE)
        text = f"{text}\n\n{prompt}" if text.strip() else prompt
    if not text.strip():
        raise TaperError("the prompt is empty", "give some text")
    return text
