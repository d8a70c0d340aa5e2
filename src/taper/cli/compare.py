"""`taper generate --compare`: the full and the tapered output of one prompt, side by side."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from ..llm import LLM, Output
from ..policy import DepthPolicy
from ..sampling import SamplingParams
from .terminal import without_controls


@dataclass
class SideBySide:
    """Two outputs beside each other while they grow."""

    titles: tuple[str, str]
    texts: list[str] = field(default_factory=lambda: ["", ""])
    outputs: list[Output | None] = field(default_factory=lambda: [None, None])

    def __rich__(self) -> Table:
        grid = Table.grid(Column(ratio=1), Column(ratio=1), expand=True)
        grid.add_row(*(self._panel(i) for i in (0, 1)))
        return grid

    def _panel(self, i: int) -> Panel:
        output = self.outputs[i]
        facts = Table.grid(padding=(0, 1))
        if output is not None:
            facts.add_row("tokens", str(output.completion_tokens))
            facts.add_row("mean depth", f"{output.mean_depth:.1f} of {output.policy.num_hidden_layers}")
            facts.add_row("tokens/s", f"{output.tokens_per_second:.1f}")
            facts.add_row("first token", f"{output.ttft_s:.2f} s")
        return Panel(Group(Text(without_controls(self.texts[i])), Text(""), facts), title=self.titles[i])

    def by_mode(self) -> dict[str, Output]:
        """The outputs by mode; those that Ctrl-C ended before they began are missing."""
        modes = zip(("full", "taper"), self.outputs, strict=True)
        return {mode: output for mode, output in modes if output is not None}

    def verdict(self) -> str:
        """What the comparison comes to, one line."""
        full, tapered = self.outputs
        if full is None or tapered is None or not full.tokens_per_second or not tapered.tokens_per_second:
            return "too short to compare"
        pairs = zip(full.token_ids, tapered.token_ids, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        same = len(full.token_ids) == len(tapered.token_ids) == shared
        texts = "the same text" if same else f"the first {shared} tokens are the same"
        ratio = tapered.tokens_per_second / full.tokens_per_second
        return f"tapered runs {ratio:.2f}x as fast per token; {texts}"


def compare(
    llm: LLM,
    prompt: Any,
    params: SamplingParams,
    policy: DepthPolicy,
    think: bool | None = None,
    screen: Console | None = None,
) -> SideBySide:
    """Complete at full depth and under a policy, a token of each in turn: what slows the machine slows both alike.

    Drawn on `screen` while it runs, if that is a terminal. Ctrl-C ends both where they are.
    """
    full = DepthPolicy.full(llm.config.num_hidden_layers)
    llm.generate("warm up", SamplingParams(max_tokens=4), policy=full, raw=True)
    picture = SideBySide((f"full depth, {full.num_hidden_layers} layers", f"tapered, {policy.label}"))
    streams = dict(enumerate(llm.stream(prompt, params, policy=chosen, think=think) for chosen in (full, policy)))
    live = screen is not None and screen.is_terminal
    with Live(picture, console=screen, refresh_per_second=8, transient=True) if live else nullcontext():
        running = dict(streams)
        try:
            while running:
                for i, stream in list(running.items()):
                    chunk = next(stream)
                    picture.texts[i] += chunk.text
                    if chunk.output is not None:
                        picture.outputs[i] = chunk.output
                        del running[i]
        except KeyboardInterrupt:
            for i, stream in running.items():
                for chunk in stream.abort():
                    picture.texts[i] += chunk.text
                    picture.outputs[i] = chunk.output
    return picture
