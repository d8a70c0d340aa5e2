"""What Taper draws in a terminal: depth by step, tokens coloured by depth, and two outputs side by side."""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import ProgressColumn, Task
from rich.table import Column, Table
from rich.text import Text

from ..models.channels import THINK, THINK_END

if TYPE_CHECKING:
    from ..policy import DepthPolicy
    from ..stream import Chunk, Output

METRICS = (  # of tables: title, name of the metric, factor
    ("KL to full depth, nats", "kl", 1),
    ("top-1 agreement, %", "agreement", 100),
    ("NLL of full depth's outputs, + %", "nll_increase", 1),
)
_BARS = " ▁▂▃▄▅▆▇█"
# From full depth to the shallowest; readable on dark and light backgrounds.
_COLOURS = ("green", "cyan", "blue", "magenta", "red")
_CHART_HEIGHT, _CHART_WIDTH = 5, 72
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tab and newline
_UNLIMITED = 10_000  # columns of a file or pipe
_WINDOW = 60  # seconds of work from which the time left is estimated
_MIN_WIDTH = 60  # columns; in fewer, or in COLUMNS=0, nothing could be read


def summary(output: Output) -> str:
    """Counts and speed of an output, one line."""
    layers = output.policy.num_hidden_layers
    cut = ", cut off by --max-tokens or the context" if output.finish_reason == "length" else ""
    drafts = f", {output.accepted_tokens} of {output.drafted_tokens} drafted tokens accepted"
    first = output.policy.first_skip
    late = first is not None and output.completion_tokens <= first and f"; this policy skips from token {first + 1} on"
    return (
        f"{output.completion_tokens} tokens, mean depth {output.mean_depth:.1f} of {layers}, "
        f"{output.tokens_per_second:.1f} tokens/s, first token after {output.ttft_s:.2f} s, {output.policy.label}"
        f"{drafts if output.drafted_tokens else ''}{cut}{late or ''}"
    )


def depth_chart(depths: Sequence[int], layers: int) -> str:
    """Layers run at each step, as bars from 0 to `layers`; in long outputs, several steps share a column."""
    if not depths:
        return "no tokens"
    width = min(len(depths), _CHART_WIDTH)
    edges = [round(column * len(depths) / width) for column in range(width + 1)]
    columns = [sum(depths[a:b]) / (b - a) for a, b in pairwise(edges)]
    lines = []
    for row in range(_CHART_HEIGHT, 0, -1):
        filled = [value / layers * _CHART_HEIGHT - (row - 1) for value in columns]
        bars = "".join(_BARS[round(max(0.0, min(1.0, part)) * 8)] for part in filled)
        label = {_CHART_HEIGHT: str(layers), 1: "0"}.get(row, "")
        lines.append(f"{label:>5} ┤{bars}")
    last = str(len(depths) - 1)
    return "\n".join([*lines, f"{'step':>5}  0{last:>{max(width - 1, len(last))}}"])


class DepthColours:
    """A colour for each depth, from all layers to the least of a policy."""

    def __init__(self, layers: int, least: int) -> None:
        self._layers, self._depths = layers, range(layers, least - 1, -1)

    def of(self, depth: int) -> str:
        """The colour of a depth."""
        return _COLOURS[(self._layers - depth) * (len(_COLOURS) - 1) // max(1, len(self._depths) - 1)]

    def style(self, chunk: Chunk) -> str:
        """The colour of a token's depth, underlined if the token had been proposed."""
        return self.of(chunk.depth or self._layers) + " underline" * chunk.is_drafted

    def text(self, chunks: Sequence[Chunk]) -> Text:
        """An output with each token in its style."""
        text = Text()
        for chunk in chunks:
            text.append(without_controls(chunk.text), style=self.style(chunk))
        return text

    def legend(self, drafts: bool = False) -> Text:
        """Which colours stand for which depths, and what is underlined if there are drafts."""
        text = Text("layers: ", style="dim")
        for name in _COLOURS:
            if group := [depth for depth in self._depths if self.of(depth) == name]:
                text.append(f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}", style=f"not dim {name}")
                text.append("  ")
        if drafts:
            text.append("drafted", style="not dim underline")
        return text


def policy_picture(policy: DepthPolicy, tokens: int) -> str:
    """Depth by step of a policy, and the layers it skips."""
    layers = policy.num_hidden_layers
    lines = [depth_chart([policy.depth(step) for step in range(tokens)], layers), ""]
    skipped = set(range(layers)) - set(policy.retained_layers(max(0, tokens - 1)))
    marks = "".join("·" if i in skipped else "█" if i in policy.core_layers else "▒" for i in range(layers))
    lines.append(f"layers 0 to {layers - 1} after {tokens} tokens: {marks}")
    lines.append("█ core, always run   ▒ flex, still run   · skipped by then")
    if policy.skip_order:
        lines.append("skipped in this order: " + " ".join(map(str, policy.skip_order)))
    if policy.adapters is not None:
        ranks = {len(down) for down, _ in policy.adapters.layers.values()}
        layers_with = " ".join(map(str, sorted(policy.adapters.layers)))
        lines.append(f"adapters of rank {', '.join(map(str, sorted(ranks)))} at layers {layers_with}")
    return "\n".join(lines)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on standard output, whose first two columns have names and are never cut or folded."""
    columns = (Column(title, no_wrap=number < 2) for number, title in enumerate(titles))
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console(stderr=False, wide=True).print(table)


def without_controls(text: str) -> str:
    """A model's text for a terminal: nothing in it moves the cursor or changes what is there."""
    return text.translate(_CONTROLS)


def styled(text: str, style: str) -> str:
    """Text in a style for the terminal; plain where NO_COLOR or the terminal itself rules styles out."""
    screen = console(stderr=False)
    if not style or screen.legacy_windows:  # which shows the codes as they are
        return text
    with screen.capture() as captured:
        screen.print(Text(text, style=style), end="", soft_wrap=True)
    return captured.get()


class Thoughts:
    """Separates a thinking model's thoughts from the rest of its text, which comes piece by piece.

    Args:
        is_inside: whether the prompt ends with the beginning of a thought.
    """

    def __init__(self, is_inside: bool) -> None:
        self._inside, self._tail = is_inside, ""

    def take(self, text: str) -> bool:
        """Whether this piece belongs to a thought, the tags around it included."""
        was_inside, self._tail = self._inside, (self._tail + text)[-len(THINK_END) - len(text) :]
        opened, closed = self._tail.rfind(THINK), self._tail.rfind(THINK_END)
        if opened != closed:  # one of them is there
            self._inside = opened > closed
        return was_inside or self._inside


def console(stderr: bool = True, wide: bool = False) -> Console:
    """The terminal; standard error, where everything but outputs goes, unless told otherwise.

    With `wide`, a file or pipe gets lines as long as they need to be, for tables.
    """
    too_narrow = os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) < _MIN_WIDTH
    screen = Console(stderr=stderr, highlight=False, markup=False, width=_MIN_WIDTH if too_narrow else None)
    if wide and not screen.is_terminal:
        screen.width = _UNLIMITED
    return screen


class TimeLeft(ProgressColumn):
    """The time that is left, estimated from the last minute up to now.

    Stored measurements pass in an instant. A column that looked only at the times between them would say one second
    for as long as the first new one takes.
    """

    max_refresh = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._seen: defaultdict[int, deque[tuple[float, float]]] = defaultdict(deque)  # seconds and what was done

    def render(self, task: Task) -> Text:
        """Minutes and seconds, or dashes while nothing was done in the last minute."""
        seen, now, left = self._seen[task.id], task.get_time(), (task.total or 0.0) - task.completed
        if left <= 0:
            return Text("0:00:00")
        seen.append((now, task.completed))
        while len(seen) > 2 and seen[1][0] <= now - _WINDOW:
            seen.popleft()
        first, before = seen[0]
        if task.completed <= before:
            return Text("-:--:--")
        return Text(str(timedelta(seconds=math.ceil(left * (now - first) / (task.completed - before)))))


@dataclass
class SideBySide:
    """Two outputs beside each other while they grow: titles, texts and finished outputs by mode."""

    titles: dict[str, str]
    texts: dict[str, str] = field(default_factory=lambda: defaultdict(str))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # when each token came
    outputs: dict[str, Output] = field(default_factory=dict)

    def __rich__(self) -> Table:
        grid = Table.grid(Column(ratio=1), Column(ratio=1), expand=True)
        grid.add_row(*map(self._panel, self.titles))
        return grid

    def _panel(self, mode: str) -> Panel:
        facts = Table.grid(padding=(0, 1))
        if output := self.outputs.get(mode):
            facts.add_row("tokens", str(output.completion_tokens))
            facts.add_row("mean depth", f"{output.mean_depth:.1f} of {output.policy.num_hidden_layers}")
            facts.add_row("tokens/s", f"{output.tokens_per_second:.1f}")
            if not output.cached_tokens:  # else it reused the prompt of the other side
                facts.add_row("first token", f"{output.ttft_s:.2f} s")
        return Panel(Group(Text(without_controls(self.texts[mode])), Text(""), facts), title=self.titles[mode])

    def add(self, mode: str, chunk: Chunk) -> None:
        """Append a chunk; the last one has the whole output."""
        self.texts[mode] += chunk.text
        self.seconds[mode].append(chunk.seconds)
        if chunk.output is not None:
            self.outputs[mode] = chunk.output

    def verdict(self) -> str:
        """The result of the comparison, one line."""
        if len(self.outputs) < 2 or not all(output.tokens_per_second for output in self.outputs.values()):
            return "too short to compare"
        full, tapered = self.outputs["full"], self.outputs["taper"]
        pairs = zip(full.token_ids, tapered.token_ids, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        same = len(full.token_ids) == len(tapered.token_ids) == shared
        beginning = f"the first {shared} tokens are the same" if shared > 1 else "the texts differ from the beginning"
        texts = "the same text" if same else beginning
        ratio, low, high = speedup(self.seconds["full"], self.seconds["taper"])
        return f"tapered runs {ratio:.2f}x as fast per token ({low:.2f} to {high:.2f}); {texts}"


def speedup(full: Sequence[float], tapered: Sequence[float]) -> tuple[float, float, float]:
    """How much faster the steps of one output are than those of another, which took turns with them.

    `full` and `tapered` are the seconds at which tokens came, at least two of each. Returns the median ratio over pairs
    of steps, and the ends of its 95 % interval, which order statistics give.
    """
    pairs = zip(pairwise(full), pairwise(tapered), strict=False)
    ratios = sorted((b - a) / max(d - c, 1e-9) for (a, b), (c, d) in pairs)
    middle, spread = (len(ratios) - 1) / 2, 0.98 * len(ratios) ** 0.5  # half of 1.96 standard deviations of the rank
    ranks = (middle, middle - spread, middle + spread)
    median, low, high = (ratios[min(max(round(rank), 0), len(ratios) - 1)] for rank in ranks)
    return median, low, high
