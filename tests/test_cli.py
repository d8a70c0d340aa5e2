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


def test_text_goes_to_standard_output_and_the_rest_to_standard_error(run, policy_file):
    result = run("generate", "hello", "--max-tokens", "12", "--policy", policy_file)
    text = json.loads(run("generate", "hello", "--max-tokens", "12", "--policy", policy_file, "--json").stdout)["text"]
    assert result.stdout == text + "\n"
    assert "mean depth" in result.stderr
    assert "tokens/s" in result.stderr


def test_json_prints_one_object(run, policy_file):
    result = json.loads(run("generate", "hi", "--max-tokens", "9", "--policy", policy_file, "--json").stdout)
    assert list(result) == KEYS
    assert result["mode"] == "taper"
    assert result["depths"][0] == result["num_hidden_layers"] == 6
    assert result["completion_tokens"] == len(result["depths"])


def test_mode_full_runs_every_layer(run):
    result = json.loads(run("generate", "hi", "--max-tokens", "9", "--mode", "full", "--json").stdout)
    assert (result["mode"], result["mean_depth"], result["policy"]) == ("full", 6.0, "full")


def test_without_a_fitting_policy_one_line_says_that_every_layer_runs(tiny_gguf):
    command = [sys.executable, "-m", "taper", "generate", "hi", "--max-tokens", "3", "--model", str(tiny_gguf)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    notes = [line for line in result.stderr.splitlines() if line.startswith("taper:")]
    assert notes == ["taper: no shipped policy fits this model: running every layer"]


def test_alpha_tapers_any_model(run):
    result = run("generate", "hi", "--max-tokens", "9", "--alpha", "0.9", "--json")
    assert "our reading" in result.stderr
    assert json.loads(result.stdout)["depths"] == [DepthPolicy.middle_first(6, 0.9).depth(i) for i in range(9)]


def test_alpha_replaces_that_of_a_given_policy(run, policy_file):
    result = run("generate", "hi", "--max-tokens", "9", "--alpha", "0.9", "--policy", policy_file, "--json")
    expected = DepthPolicy.d3(6, 0.9, skip_order=[4, 1, 2])
    assert json.loads(result.stdout)["depths"] == [expected.depth(i) for i in range(9)]


def test_compare_gives_both_answers_as_if_alone(run, policy_file):
    both = json.loads(run("generate", "hi", "--max-tokens", "9", "--policy", policy_file, "--compare", "--json").stdout)
    assert list(both) == ["full", "taper"]
    for name, options in (("full", ["--mode", "full"]), ("taper", ["--policy", policy_file])):
        alone = json.loads(run("generate", "hi", "--max-tokens", "9", *options, "--json").stdout)
        assert both[name]["text"] == alone["text"]
        assert both[name]["depths"] == alone["depths"]


def test_compare_shows_them_side_by_side(run, policy_file):
    result = run("generate", "hi", "--max-tokens", "9", "--policy", policy_file, "--compare")
    assert "full depth, 6 layers" in result.stdout
    assert "tokens/s" in result.stdout
    assert "as fast per token" in result.stderr


def test_show_depth_draws_on_standard_error(run, policy_file):
    plain = run("generate", "hi", "--max-tokens", "20", "--policy", policy_file)
    drawn = run("generate", "hi", "--max-tokens", "20", "--policy", policy_file, "--show-depth")
    assert drawn.stdout == plain.stdout
    assert "step" in drawn.stderr
    assert "layers: 6" in drawn.stderr


def test_a_dash_reads_the_prompt_from_standard_input(run):
    piped = run("generate", "-", "--max-tokens", "9", "--mode", "full", stdin="hi")
    assert piped.stdout == run("generate", "hi", "--max-tokens", "9", "--mode", "full").stdout


def test_system_messages_reach_the_prompt(run):
    options = ("generate", "hi", "--max-tokens", "2", "--mode", "full", "--json")
    plain, led = json.loads(run(*options).stdout), json.loads(run(*options, "--system", "be kind").stdout)
    assert led["prompt_tokens"] > plain["prompt_tokens"] + len("be kind")


def test_chat_answers_each_turn_with_all_before(run):
    result = run("chat", "--max-tokens", "5", "--mode", "full", stdin="hello\nagain\n/reset\nhello\n/exit\nnever\n")
    answers = result.stdout.splitlines()
    assert result.stderr.count("mean depth") == 3
    assert answers[0] == answers[-1]


@pytest.mark.parametrize("option", [("--top-p", "0.5"), ("--top-k", "3"), ("--min-p", "0.1"), ("--seed", "1")])
def test_options_that_do_nothing_at_temperature_zero_are_refused(tiny_gguf, option):
    result = CliRunner().invoke(cli, ["generate", "hi", "--model", str(tiny_gguf), *option])
    assert "does nothing at temperature 0" in str(result.exception)


def test_policy_list_and_show(policy_file):
    listed = CliRunner().invoke(cli, ["policy", "list"])
    assert all(name in listed.stdout for name in ("gentle", "balanced", "fast"))
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
    ],
)
def test_thoughts_are_told_from_the_answer(pieces, thought):
    thoughts = Thoughts()
    assert [thoughts.take(piece) for piece in pieces] == thought


def test_a_thought_that_the_prompt_begins_goes_on_in_the_output():
    thoughts = Thoughts()
    thoughts.take("assistant\n<think>\n")
    assert [thoughts.take(piece) for piece in ("so", "</think>", "yes")] == [True, True, False]


def test_thoughts_are_dimmed_without_a_line_break(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert dimmed("a [b] " * 100) == "\x1b[2m" + "a [b] " * 100 + "\x1b[0m"
    monkeypatch.delenv("FORCE_COLOR")
    assert dimmed("text\n") == "text\n"


def test_a_switch_that_the_model_lacks_is_refused(tiny_gguf):
    result = subprocess.run(
        [sys.executable, "-m", "taper", "generate", "hello", "--no-think", "--model", str(tiny_gguf), "--threads", "1"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "think" in result.stderr
    assert result.stderr.count("\n") == 1
