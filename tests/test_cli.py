"""The command line: what goes to standard output, what to standard error, and the pictures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from taper import DepthPolicy, __version__
from taper.cli import cli
from taper.cli.terminal import Thoughts, depth_chart, dimmed, policy_picture

KEYS = ["text", "finish_reason", "prompt_tokens", "completion_tokens", "num_hidden_layers", "mean_depth", "depths"]
KEYS += ["ttft_s", "tokens_per_second", "mode", "policy", "model"]


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "own.json"
    path.write_text(DepthPolicy.d3(6, 0.95, skip_order=[4, 1, 2]).to_json())
    return str(path)


@pytest.fixture
def run(tiny_gguf):
    def run(*args, stdin=None):
        result = CliRunner().invoke(cli, [*args, "--model", str(tiny_gguf), "--threads", "1"], input=stdin)
        assert result.exit_code == 0, result.output
        return result

    return run


@pytest.fixture
def generate(run):
    """What `generate --json` prints for a prompt."""
    return lambda *args: json.loads(run("generate", "hi", "--max-tokens", "9", *args, "--json").stdout)


def test_text_goes_to_standard_output_and_the_rest_to_standard_error(run, generate, policy_file):
    options = ("--policy", policy_file)
    plain = run("generate", "hi", "--max-tokens", "9", *options)
    drawn = run("generate", "hi", "--max-tokens", "9", *options, "--show-depth")
    assert plain.stdout == drawn.stdout == generate(*options)["text"] + "\n"
    assert all("mean depth" in each.stderr and "tokens/s" in each.stderr for each in (plain, drawn))
    assert "step" in drawn.stderr
    assert "layers: 6" in drawn.stderr


def test_json_is_one_object_in_either_mode(generate, policy_file):
    result = generate("--policy", policy_file)
    assert list(result) == KEYS
    assert result["mode"] == "taper"
    assert result["depths"][0] == result["num_hidden_layers"] == 6
    assert result["completion_tokens"] == len(result["depths"])
    result = generate("--mode", "full")
    assert (result["mode"], result["mean_depth"], result["policy"]) == ("full", 6.0, "full")


def test_without_a_fitting_policy_one_line_says_that_every_layer_runs(tiny_gguf):
    command = [sys.executable, "-m", "taper", "generate", "hi", "--max-tokens", "3", "--model", str(tiny_gguf)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    notes = [line for line in result.stderr.splitlines() if line.startswith("taper:")]
    assert notes == ["taper: no shipped policy fits this model: running every layer"]


def test_alpha_tapers_any_model_and_replaces_that_of_a_given_policy(run, generate, policy_file):
    for options, policy in (
        ([], DepthPolicy.middle_first(6, 0.9)),
        (["--policy", policy_file], DepthPolicy.d3(6, 0.9, skip_order=[4, 1, 2])),
    ):
        assert generate("--alpha", "0.9", *options)["depths"] == [policy.depth(step) for step in range(9)]
    assert "our reading" in run("generate", "hi", "--max-tokens", "2", "--alpha", "0.9").stderr


def test_compare_gives_both_outputs_as_if_alone_and_shows_them_side_by_side(run, generate, policy_file):
    both = generate("--policy", policy_file, "--compare")
    assert list(both) == ["full", "taper"]
    for name, options in (("full", ["--mode", "full"]), ("taper", ["--policy", policy_file])):
        alone = generate(*options)
        assert (both[name]["text"], both[name]["depths"]) == (alone["text"], alone["depths"])
    result = run("generate", "hi", "--max-tokens", "9", "--policy", policy_file, "--compare")
    assert "full depth, 6 layers" in result.stdout
    assert "tokens/s" in result.stdout
    assert "as fast per token" in result.stderr


def test_a_dash_reads_the_prompt_from_standard_input(run):
    piped = run("generate", "-", "--max-tokens", "9", "--mode", "full", stdin="hi")
    assert piped.stdout == run("generate", "hi", "--max-tokens", "9", "--mode", "full").stdout


def test_system_messages_reach_the_prompt(generate):
    plain, led = generate("--mode", "full"), generate("--mode", "full", "--system", "be kind")
    assert led["prompt_tokens"] > plain["prompt_tokens"] + len("be kind")


def test_chat_completes_each_turn_after_all_before(run):
    result = run("chat", "--max-tokens", "5", "--mode", "full", stdin="hello\nagain\n/reset\nhello\n/exit\nnever\n")
    outputs = result.stdout.splitlines()
    assert result.stderr.count("mean depth") == 3
    assert outputs[0] == outputs[-1]


def test_policy_list_and_show(policy_file):
    listed = CliRunner().invoke(cli, ["policy", "list"])
    assert all(name in listed.stdout for name in ("gentle", "balanced", "fast"))
    assert "qwen2.5-coder-1.5b-instruct" in listed.stdout  # without a terminal, no cell is cut or folded
    for name in ("fast", policy_file):
        shown = CliRunner().invoke(cli, ["policy", "show", name])
        assert "mean depth" in shown.stdout
        assert "skipped in this order" in shown.stdout
    as_json = CliRunner().invoke(cli, ["policy", "show", policy_file, "--json"])
    assert DepthPolicy.from_json(as_json.stdout).skip_order == (4, 1, 2)


def test_depth_chart_has_a_column_a_step_or_shares_them():
    short = depth_chart([6, 6, 3], 6).splitlines()
    assert short[0] == "    6 ┤██ "
    assert short[2] == "      ┤██▄"
    assert short[-1] == " step  0 2"
    assert max(map(len, depth_chart([6] * 5000, 6).splitlines())) < 85
    assert depth_chart([], 6) == "no tokens"


def test_policy_picture_marks_core_flex_and_skipped_layers():
    picture = policy_picture(DepthPolicy.d3(6, 0.9, min_depth=5, skip_order=[4, 1]), 50)
    assert "█▒██·█" in picture


def test_version_says_what_ggml_was_built_with_and_what_to_do_about_it(monkeypatch):
    from taper.backends.ggml import repack as features

    shown = CliRunner().invoke(cli, ["--version"]).stdout
    assert shown.startswith(f"taper {__version__}, ggml-python ")
    built = {"AVX2": False, "REPACK": True}
    monkeypatch.setattr(features, "features", lambda: built)
    lines = CliRunner().invoke(cli, ["--version"]).stdout.splitlines()
    assert lines[0].endswith("with REPACK")
    assert [line.split(":")[0] for line in lines[1:]] == ["without AVX2", "without LLAMAFILE"]
    assert "CMAKE_ARGS=-DGGML_LLAMAFILE=ON" in lines[2]


def test_no_repack_changes_no_token_in_f32(run):
    options = ("generate", "hi", "--max-tokens", "9", "--mode", "full", "--dtype", "f32")
    assert run(*options, "--no-repack").stdout == run(*options).stdout


@pytest.mark.parametrize(
    ("pieces", "thought"),
    [
        (["<think>", "so", "</think>", "yes"], [True, True, True, False]),
        (["<", "think", ">so", "</th", "ink>", "yes"], [False, False, True, True, True, False]),
        (["so", " then</think>", "yes", "<think>"], [False, False, False, True]),
        (["a < b", "think > c"], [False, False]),
        (["<think></think>", "yes"], [False, False]),
        (["assistant\n<think>\n", "so", "</think>", "yes"], [True, True, True, False]),  # the prompt's end first
    ],
)
def test_thoughts_are_separated_from_the_rest(pieces, thought):
    thoughts = Thoughts()
    assert [thoughts.take(piece) for piece in pieces] == thought


def test_thoughts_are_dimmed_without_a_line_break(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert dimmed("a [b] " * 100) == "\x1b[2m" + "a [b] " * 100 + "\x1b[0m"
    monkeypatch.delenv("FORCE_COLOR")
    assert dimmed("text\n") == "text\n"
