"""Draws docs/pictures/ from a real run of the default model, with the functions that the command line draws with.

python research/picture.py

Times are left out, as they depend on the machine: docs/results.md has measured ones.
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

from taper import LLM
from taper.cli.terminal import DepthColours, SideBySide, depth_chart

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
PROMPT, POLICY, MAX_TOKENS, SEED = "What is photosynthesis?", "fast", 96, 2
WIDTH = 84

# A dark window of its own, so that the picture reads well on light and dark pages alike.
THEME = TerminalTheme(
    (27, 31, 36),
    (201, 209, 217),
    [
        *((88, 96, 105), (255, 123, 114), (126, 211, 133), (230, 192, 100)),
        *((121, 176, 255), (214, 150, 255), (86, 212, 221), (201, 209, 217)),
    ],
)
# Rich's own format without its web fonts: the picture loads nothing.
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    llm = LLM()
    params = llm.sampling_params(max_tokens=MAX_TOKENS, seed=SEED)
    full = llm.generate(PROMPT, params, mode="full")
    chunks = list(llm.stream(PROMPT, params, policy=POLICY))
    tapered = chunks[-1].output
    assert tapered is not None
    layers = llm.config.num_hidden_layers
    colours = DepthColours(layers, tapered.policy.min_depth)
    titles = {"full": f"full depth, {layers} layers", "taper": f"tapered, {tapered.policy.label}"}
    draw(
        "show-depth.svg",
        f'taper generate --show-depth --policy {POLICY} --max-tokens {MAX_TOKENS} --seed {SEED} "{PROMPT}"',
        depth_chart(tapered.depths, layers),
        colours.text(chunks),
        colours.legend(),
    )
    draw(
        "compare.svg",
        f'taper generate --compare --policy {POLICY} --max-tokens {MAX_TOKENS} --seed {SEED} "{PROMPT}"',
        SideBySide(titles, {"full": full.text, "taper": tapered.text}),
    )


def draw(name: str, command: str, *parts: RenderableType) -> None:
    """Write a command and what it draws as a picture of a terminal."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(f"[bold]$ {command}[/bold]\n")
    for part in parts:
        console.print(part, markup=False)
    PICTURES.mkdir(exist_ok=True)
    console.save_svg(str(PICTURES / name), title="Taper", theme=THEME, code_format=FORMAT, unique_id="taper")
    print(PICTURES / name)


if __name__ == "__main__":
    main()
