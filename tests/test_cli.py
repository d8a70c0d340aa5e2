"""The command line: what goes to standard output, what to standard error, and the pictures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from forked import run_taper

from taper import Chunk, DepthPolicy, __version__
from taper.cli import cli
from taper.cli.terminal import DepthColours, SideBySide, Thoughts, depth_chart, policy_picture, styled
from taper.errors import RequestError

KEYS = ["text", "finish_reason", "prompt_tokens", "completion_tokens", "num_hidden_layers", "mean_depth", "depths"]
KEYS += ["ttft_s", "tokens_per_second", "drafted_tokens", "accepted_tokens", "mode", "policy", "model", "sampling"]
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "own.json"
    path.write_text(DepthPolicy.d3(6, 0.95, skip_order=[4, 1, 2]).to_json())
    return str(path)


@pytest.fixture
def run(tiny_gguf):
    def run(*args, stdin=None, greedy=True):
        more = GREEDY if greedy else ()
        result = CliRunner().invoke(cli, [*args, *more, "--model", str(tiny_gguf), "--threads", "1"], input=stdin)
        assert result.exit_code == 0, result.output
        return result

    return run


@pytest.fixture
def generate(run):
    """What `generate --json` prints for a prompt."""
    return lambda *args: json.loads(run("generate", "hi", "--max-tokens", "9", *args, "--json").stdout)


def test_help_describes_each_command_in_a_whole_sentence_and_begins_with_generate():
    lines = CliRunner().invoke(cli, ["--help"]).stdout.partition("Commands:\n")[2].splitlines()
    assert lines[0].split()[0] == "generate"
    assert len(lines) == len(cli.commands)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_text_goes_to_standard_output_and_the_rest_to_standard_error(run, generate, policy_file):
    options = ("--policy", policy_file)
    plain = run("generate", "hi", "--max-tokens", "9", *options)
    drawn = run("generate", "hi", "--max-tokens", "9", *options, "--show-depth")
    assert plain.stdout == drawn.stdout == generate(*options)["text"] + "\n"
    assert all("mean depth" in each.stderr and "tokens/s" in each.stderr for each in (plain, drawn))
    assert "step" in drawn.stderr
    assert "layers: 6" in drawn.stderr
    assert "cut off by --max-tokens" in plain.stderr


def test_an_output_that_ends_before_its_policy_skips_says_from_where_it_does(run, tmp_path):
    late = tmp_path / "late.json"
    late.write_text(DepthPolicy.d3(6, 0.9, start=4, skip_order=[4, 1, 2]).to_json())
    for command, stdin in ((("generate", "hi"), None), (("chat",), "hi\n")):
        for tokens, is_short in ((5, True), (6, False)):
            shown = run(*command, "--policy", str(late), "--max-tokens", str(tokens), stdin=stdin).stderr
            assert ("; this policy skips from token 6 on" in shown) == is_short
    assert "skips from" not in run("generate", "hi", "--mode", "full", "--max-tokens", "5").stderr


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
    assert notes == ["taper: every layer runs, as no policy comes with this model; taper calibrate makes one"]


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
    ratio, low, high = map(float, re.search(r"(\S+)x as fast per token \((\S+) to (\S+)\)", result.stderr).groups())
    assert low <= ratio <= high


@pytest.mark.parametrize(
    ("tapered", "said"),
    [
        ([1, 2, 3], "the same text"),
        ([1, 2, 4], "the first 2 tokens are the same"),
        ([1, 3, 2], "the texts differ from the beginning"),
        ([3, 2, 1], "the texts differ from the beginning"),
    ],
)
def test_a_comparison_says_how_long_the_texts_are_the_same(tapered, said):
    outputs = {
        mode: SimpleNamespace(token_ids=ids, tokens_per_second=1.0)
        for mode, ids in (("full", [1, 2, 3]), ("taper", tapered))
    }
    seconds = {"full": [0.0, 1.0, 2.0], "taper": [0.5, 1.5, 2.5]}
    assert SideBySide({}, seconds=seconds, outputs=outputs).verdict().endswith(f"; {said}")


def test_a_dash_reads_the_prompt_from_standard_input(run):
    piped = run("generate", "-", "--max-tokens", "9", "--mode", "full", stdin="hi")
    assert piped.stdout == run("generate", "hi", "--max-tokens", "9", "--mode", "full").stdout


def test_system_messages_reach_the_prompt(generate):
    plain, led = generate("--mode", "full"), generate("--mode", "full", "--system", "be kind")
    assert led["prompt_tokens"] > plain["prompt_tokens"] + len("be kind")


def test_standard_input_stands_before_the_prompt_and_alone_is_one(run, generate):
    joined = run("generate", "and then?", "--max-tokens", "9", "--json", stdin="first\n").stdout
    whole = generate_text(run, "first\n\nand then?")
    assert json.loads(joined)["text"] == whole
    assert json.loads(run("generate", "--max-tokens", "9", "--json", stdin="hi\n").stdout) | TIMES == generate() | TIMES
    assert json.loads(run("generate", "-p", "hi", "-n", "9", "--json").stdout) | TIMES == generate() | TIMES


TIMES = {"ttft_s": 0, "tokens_per_second": 0}


def generate_text(run, prompt: str) -> str:
    return json.loads(run("generate", prompt, "--max-tokens", "9", "--json").stdout)["text"]


@pytest.mark.parametrize(
    "arguments", [("generate", "", "--json"), ("generate", "a", "-p", "b"), ("run", "m", "a", "--model", "n")]
)
def test_no_prompt_and_two_are_refused(tiny_gguf, arguments):
    result = CliRunner().invoke(cli, [*arguments, *([] if "run" in arguments else ["--model", str(tiny_gguf)])])
    assert result.exit_code != 0


def test_run_answers_with_a_model_that_is_here(tiny_gguf, generate):
    result = CliRunner().invoke(cli, ["run", str(tiny_gguf), "hi", "-n", "9", "-t", "1", *GREEDY])
    assert result.stdout == generate()["text"] + "\n"


def test_list_shows_models_by_name():
    lines = CliRunner().invoke(cli, ["list"]).stdout.splitlines()
    assert any("smollm2-135m-instruct" in line and "taper pull" in line for line in lines)  # the cache is empty


def test_names_that_are_nearly_right_get_a_hint(tiny_gguf):
    for arguments, meant in (
        (["generate", "hi", "--model", "smolm2-135m-instruct"], "smollm2-135m-instruct"),
        (["policy", "show", "fast-plane"], "fast-plain"),
        (["generat", "hi"], "generate"),
    ):
        code, _, said = run_taper(*arguments)
        assert code == 2
        assert "id you mean" in said.decode()
        assert meant in said.decode()


@pytest.mark.parametrize(
    ("arguments", "now"),
    [
        (["reproduce", "model.gguf"], "research/reproduce.py"),
        (["calibrate", "--model", "model.gguf", "--baselines"], "research/reproduce.py"),
        (["generate", "--no-repack", "hi"], "--repack never"),
        (["compare", "hi"], "taper generate --compare"),
        (["eval", "problems.jsonl"], "a file of problems goes with --tasks"),
        (["calibrate", "prompts.jsonl"], "a file of prompts goes with --prompts"),
    ],
)
def test_what_older_versions_had_and_what_one_may_guess_is_told_what_to_write_instead(arguments, now):
    code, _, said = run_taper(*arguments)
    assert (code, said.count(b"\n")) == (2, 1)
    assert now in said.decode()


def test_options_come_from_variables_too(tiny_gguf, monkeypatch, generate):
    monkeypatch.setenv("TAPER_GENERATE_MAX_TOKENS", "9")
    result = CliRunner().invoke(cli, ["generate", "hi", "--json", *GREEDY, "--model", str(tiny_gguf), "-t", "1"])
    assert json.loads(result.stdout)["text"] == generate()["text"]


def test_every_long_option_has_a_variable_of_its_name(monkeypatch):
    def commands(group, names):
        for name, command in group.commands.items():
            yield (*names, name), command
            if isinstance(command, click.Group):
                yield from commands(command, (*names, name))

    for names, command in commands(cli, ("taper",)):
        for option in command.params:
            for flag in getattr(option, "opts", ()):
                if flag.startswith("--") and flag == max(option.opts, key=len):
                    variable = "_".join([*names, flag.removeprefix("--")]).replace("-", "_").upper()
                    assert variable in option.envvar, (variable, option.envvar)
    monkeypatch.setenv("TAPER_POLICY_SHOW_JSON", "1")
    shown = CliRunner().invoke(cli, ["policy", "show", "fast"]).stdout
    assert json.loads(shown)["name"] == "fast"
    monkeypatch.setenv("TAPER_VERSION", "9")  # many a container has it
    assert CliRunner().invoke(cli, ["policy", "show", "fast"]).exit_code == 0


def test_policies_of_one_name_are_not_for_vllm_together(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.json").write_text(DepthPolicy.d3(6, 0.9, skip_order=[3]).to_json())
    allowed = [f"--allow={tmp_path}/{folder}/mine.json" for folder in ("a", "b")]
    with pytest.raises(RequestError, match="same name"):
        cli.main(["vllm-args", "--policy", "fast", *allowed], standalone_mode=False)


def test_chat_has_commands_and_refuses_others(run):
    lines = ["/?", "/policy", "/policy full", "/policy nonsense", "/system be kind", "/rest", "hello", "/bye"]
    result = run("chat", "--max-tokens", "5", "--mode", "full", stdin="\n".join(lines) + "\nnever\n")
    for said in ("tiny, full", "Alt-Enter", "policy full", "no policy 'nonsense'", "system message: be kind"):
        assert said in result.stderr
    assert "no command /rest; did you mean /reset?" in result.stderr
    assert result.stderr.count("mean depth") == 1


def test_what_users_of_other_programs_type_in_a_chat(run):
    lines = ["/set system be kind", "/system", '/system ""', "/set parameter temperature 0", "/set parameter top_p 7"]
    lines += [
        "/set parameter num_predict 3",
        "/set parameter nonsense 1",
        "/set",
        "/clear",
        '"""',
        "/several",
        'lines"""',
    ]
    result = run("chat", "--max-tokens", "5", "--mode", "full", stdin="\n".join(lines) + "\n")
    said = ["system message: be kind", "no system message", "temperature 0", "top_p is 7", "max_tokens 3"]
    said += ["no parameter nonsense", "/set parameter NAME VALUE", "a new conversation\n", "3 tokens"]
    assert all(one in result.stderr for one in said), result.stderr
    assert result.stderr.count("mean depth") == 1


def test_a_chat_goes_on_after_another_system_message(run):
    outputs = {
        middle: run("chat", "--max-tokens", "5", "--mode", "full", stdin=f"hello\n{middle}\nagain\n").stdout
        for middle in ("/system be kind", "/system", "/set system be kind")
    }
    assert outputs["/system be kind"] == outputs["/set system be kind"] != outputs["/system"]


def test_a_system_message_of_a_chat_reaches_its_prompt(run):
    plain, led = (
        run("chat", "--max-tokens", "5", "--mode", "full", stdin=f"{first}hello\n").stdout
        for first in ("", "/system be kind\n")
    )
    also = run("chat", "--max-tokens", "5", "--mode", "full", "--system", "be kind", stdin="hello\n").stdout
    assert led == also != plain


def test_chat_completes_each_turn_after_all_before(run):
    result = run("chat", "--max-tokens", "5", "--mode", "full", stdin="hello\nagain\n/reset\nhello\n/exit\nnever\n")
    outputs = result.stdout.splitlines()
    assert result.stderr.count("mean depth") == 3
    assert outputs[0] == outputs[-1]


def test_show_says_what_a_model_is(tiny_gguf):
    shown = CliRunner().invoke(cli, ["show", str(tiny_gguf)]).stdout
    for said in ("llama", "6, of 64 dimensions", "vocabulary", "context", "chat template", "none comes with Taper"):
        assert said in shown
    assert cli.main(["pull", str(tiny_gguf)], standalone_mode=False) is None


def test_a_model_that_does_not_exist_is_named_before_an_empty_prompt(run):
    done = CliRunner().invoke(cli, ["generate", "--model", "nowhere.gguf", "  "])
    assert "no model 'nowhere.gguf'" in str(done.exception)


def test_policy_list_and_show(policy_file):
    listed = CliRunner().invoke(cli, ["policy", "list"])
    assert all(name in listed.stdout for name in ("fast-plain", "fast"))
    assert "qwen2.5-coder-1.5b-instruct" in listed.stdout  # without a terminal, no cell is cut or folded
    for name in ("fast", policy_file):
        shown = CliRunner().invoke(cli, ["policy", "show", name])
        assert "mean depth" in shown.stdout
        assert "skipped in this order" in shown.stdout
    as_json = CliRunner().invoke(cli, ["policy", "show", policy_file, "--json"])
    assert DepthPolicy.from_json(as_json.stdout).skip_order == (4, 1, 2)


@pytest.mark.parametrize(
    ("provenance", "lost"),
    [
        ({}, "not measured"),
        ({"long_outputs": "all"}, "not measured"),
        ({"long_outputs": {"failures": ["ending", "circles"]}}, "ending, circles"),
        ({"long_outputs": {"failures": []}}, "nothing that was seen"),
    ],
)
def test_a_policy_says_what_it_may_lose_in_long_outputs(tmp_path, provenance, lost):
    policy = replace(DepthPolicy.d3(6, 0.95, skip_order=[4, 1, 2]), provenance=provenance)
    (tmp_path / "own.json").write_text(policy.to_json())
    shown = CliRunner().invoke(cli, ["policy", "show", str(tmp_path / "own.json")])
    assert shown.stdout.splitlines()[-1] == f"what it may lose in outputs of 1,024 tokens: {lost}"


@pytest.mark.parametrize(("measured", "warned"), [(8, True), (9, False), (None, False)])
def test_an_output_longer_than_its_policy_was_measured_in_says_so(run, tmp_path, measured, warned):
    policy = replace(DepthPolicy.d3(6, 0.95, skip_order=[4, 1, 2]), provenance={"answer_tokens": measured})
    (tmp_path / "own.json").write_text(policy.to_json())
    result = run("generate", "hi", "--max-tokens", "9", "--policy", str(tmp_path / "own.json"))
    assert ("measured in outputs of up to 8 tokens; this one has 9" in result.stderr) is warned


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
    from taper.backends.ggml import layouts
    from taper.backends.ggml.layouts import Layout
    from taper.backends.ggml.library import ggml
    from taper.models.preview import previews_folder

    monkeypatch.setattr("taper.models.preview.kept_previews", list)
    shown = CliRunner().invoke(cli, ["--version"]).stdout
    assert shown.startswith(f"taper {__version__}, ggml ")
    built = {"AVX2": False, "REPACK": True}
    monkeypatch.setattr(layouts, "layout_for_many", lambda dtype, threads: second.get(dtype))
    second = {"Q4_1": Layout("BF16", 4), "Q4_K": Layout("Q4_K", 16)}
    monkeypatch.setattr(ggml, "unused_instructions", lambda: ["AVX512"])
    monkeypatch.setattr(ggml, "features", lambda: built)
    monkeypatch.setattr(ggml, "rejected", ["a library: too old"])
    monkeypatch.setattr(ggml, "devices", [])
    lines = CliRunner().invoke(cli, ["--version"]).stdout.splitlines()
    assert lines[1].endswith("built with REPACK")
    assert str(ggml.place.folder) in lines[1]
    assert lines[2].startswith("no device besides the processor; pip install")
    assert lines[3] == (
        "two layouts, with --repack auto: Q4_1 also in bf16, for 4 tokens or more; "
        "Q4_K also as in the file, for 16 tokens or more"
    )
    assert lines[4] == f"previews of output heads, with --head auto: 0 in {previews_folder()}"
    assert [line.split(":")[0] for line in lines[5:]] == ["not used", "without AVX2", "without LLAMAFILE, AVX512"]
    assert "taper-llm[native]" in lines[-1]


def test_repacking_changes_no_token_in_f32(run):
    options = ("generate", "hi", "--max-tokens", "9", "--mode", "full", "--dtype", "f32")
    assert run(*options, "--repack", "never").stdout == run(*options).stdout


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
def test_thoughts_are_separated_from_the_rest(pieces, thought):
    thoughts = Thoughts(is_inside=False)
    assert [thoughts.take(piece) for piece in pieces] == thought


def test_a_thought_that_the_prompt_begins_goes_on():
    thoughts = Thoughts(is_inside=True)
    assert [thoughts.take(piece) for piece in ("so", "</think>", "yes")] == [True, True, False]


def test_thoughts_are_dimmed_without_a_line_break(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert styled("a [b] " * 100, "dim") == "\x1b[2m" + "a [b] " * 100 + "\x1b[0m"
    monkeypatch.delenv("FORCE_COLOR")
    assert styled("text\n", "dim") == styled("text\n", "") == "text\n"


def test_each_depth_has_a_colour_from_all_layers_to_the_least():
    colours = DepthColours(30, 24)
    assert (colours.of(30), colours.of(24)) == ("green", "red")
    assert colours.legend().plain.split() == ["layers:", "30-29", "28", "27-26", "25", "24"]
    assert DepthColours(6, 6).of(6) == "green"
    chunks = [Chunk(0, "a", 1, 30), Chunk(0, "b", 2, 24, is_drafted=True)]
    assert [colours.style(chunk) for chunk in chunks] == ["green", "red underline"]
    assert colours.legend(drafts=True).plain.split()[-1] == "drafted"
