"""`taper eval`: its table, records that survive a kill, and a user's mistakes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from eval_data import write_data
from forked import posix_only
from lm_eval.api.registry import get_model

from taper import LLM, DepthPolicy
from taper.cli import cli
from taper.cli import eval as eval_command
from taper.cli.common import duration
from taper.errors import RequestError, TaperError
from taper.lab.evals import __main__ as harness_command
from taper.lab.evals import evaluate, harness, load_tasks, tasks
from taper.lab.evals.records import RecordFile

TAPERED = DepthPolicy.d3(6, 0.9, skip_order=[4, 1, 2])
HEADER = json.dumps({"format": 2, "settings": {"seed": 0}, "policies": {}, "conditions": []})


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def llm(tiny_llama) -> LLM:
    return LLM(tiny_llama.folder, device="cpu", dtype="f32", context=512, threads=1, max_batch_size=3)


@pytest.fixture
def command(tiny_llama, data, tmp_path):
    """The arguments of an evaluation that runs, less its tasks."""
    (tmp_path / "policy.json").write_text(TAPERED.to_json())
    model = ["--model", tiny_llama.folder, "--device", "cpu", "--dtype", "f32", "--context", 512, "--threads", 1]
    out = ["--out", tmp_path / "out.jsonl"]
    return ["eval", *model, "--data-dir", data, "--policy", tmp_path / "policy.json", "--max-tokens", 24, *out]


def run(*arguments) -> str:
    """Standard output of a command that ends well."""
    result = CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def by_problem(path: Path) -> list[dict]:
    return sorted(records(path), key=lambda record: (record["problem"], record["policy"]))


# What it prints and writes


def test_table_and_records(command, tmp_path):
    text = run(*command, "--tasks", "gsm8k", "--fewshot", 0, "--chat", "--limit", 5)
    title, head, full, tapered, *_ = text.splitlines()
    assert title == "gsm8k: 5 problems, 0-shot chat, version 3.0, exact_match under flexible-extract"
    assert head.rstrip().split("  ")[-1] == "loss within 1 point"
    assert full.split()[:2] == ["full", "0.0"]
    assert tapered.split()[:2] == ["taper", "power"]
    assert re.search(r"not enough problems: about [\d,]+ more needed, about \d+ (s|min|h|days) here$", tapered.rstrip())
    assert len(tapered) > 80  # a pipe has no width, so nothing is folded or cut
    assert "gsm8k: outputs that reached the limit of tokens, which --max-tokens raises: 100% (full), 100% " in text
    header = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert header["settings"]["tasks"] == {"gsm8k": {"version": "3.0", "fewshot": 0}}
    assert header["conditions"][0]["batch_size"] == 16
    assert len(records(tmp_path / "out.jsonl")) == 10
    first = by_problem(tmp_path / "out.jsonl")[0]
    assert set(first["metrics"]) == {"strict-match", "flexible-extract"}
    (answer,) = first["completions"]
    assert (first["mode"], len(answer["token_ids"]), answer["mean_depth"]) == ("full", 24, 6.0)


def test_problems_of_ones_own_are_asked_by_the_chat_template_if_the_model_has_one(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.csv").write_text("id,Prompt,answer\n" + "".join(f'{i},"{i},\n+ 1?",{i + 1}\n' for i in range(5)))
    at = command.index("--data-dir")
    del command[at : at + 2], command[-2:]  # and --out
    for more, form in (([], " chat"), (["--no-chat"], "")):
        result = CliRunner().invoke(cli, [*map(str, command), "--tasks", "sums.csv", "--limit", "4", *more])
        assert result.exit_code == 0, result.output
        assert "loading sums.csv\n4 problems of sums.csv, each at full depth and under " in result.stderr
        assert "; the first: 0, + 1?\n" in result.stderr
        assert f"sums: 4 problems, asked {'by the chat template' if form else 'in plain text'}\n" in result.stdout
        assert "not enough problems: no verdict comes from fewer than 5" in result.stdout
        (file,) = tmp_path.glob("eval-*")
        assert file.name.endswith("-sums.jsonl")
        assert json.loads(file.read_text().splitlines()[0])["settings"]["chat"] == bool(form)
        file.unlink()
    (tmp_path / "sums.tsv").write_text("prompt\n1 + 1?\n")
    with pytest.raises(RequestError, match=r"sums\.tsv has no column answer; its columns are 'prompt'"):
        run(*command, "--tasks", "sums.tsv")


def test_empty_outputs_are_said_before_any_verdict(command, tmp_path, monkeypatch):
    complete = harness.complete

    def empty(llm, chains):
        for number, output in complete(llm, chains):
            yield number, replace(output, text=" \n" if number else output.text)

    monkeypatch.setattr(harness, "complete", empty)
    first = run(*command, "--tasks", "gsm8k", "--fewshot", 0).splitlines()[0]
    assert first.startswith("gsm8k: most outputs are empty, so its figures say nothing: 83% (full), 83% (power")
    assert first.endswith("; ask by the chat template: --chat.")


def test_the_time_of_problems_still_needed_is_in_the_unit_that_suits_it():
    assert [duration(seconds) for seconds in (0.1, 90, 150, 9000, 260_000)] == [
        "about 1 s",
        "about 90 s",
        "about 2 min",
        "about 2 h",
        "about 3 days",
    ]


def test_cut_prompts_json_and_groups(command, tmp_path):
    text = run(*command, "--tasks", "gsm8k", "--limit", 2, "--context", 300, "--out", tmp_path / "cut.jsonl")
    assert "2 prompts did not fit with the output and lost the beginning; --context raises the limit." in text
    arguments = [*command, "--tasks", "bbh_cot_fewshot,gsm8k", "--filter"]
    with pytest.raises(RequestError, match=r"has no filter 'get-answer' \(it has strict-match and flexible-extract\)"):
        run(*arguments, "get-answer")
    summary = json.loads(run(*arguments[:-1], "--margin", 0.2, "--json"))
    results = {result["name"]: result for result in summary["results"]}
    assert results["bbh_cot_fewshot"]["problems"] == 4
    assert results["bbh_cot_fewshot"]["figure"] == "exact_match under get-answer"
    assert results["gsm8k"]["scores"][1]["against_full"]["margin"] == 0.2
    assert len(summary["missing"]) == 25
    assert summary["num_truncated"] == 4  # BBH: the tiny model reads bytes, so no prompt with examples fits


def test_progress_has_the_time_left_and_the_accuracy_so_far(command, monkeypatch):
    monkeypatch.setattr(eval_command, "_EVERY", 0)
    result = CliRunner().invoke(cli, [*map(str, command), "--tasks", "gsm8k", "--fewshot", "0"])
    lines = [line for line in result.stderr.splitlines() if "min left" in line]
    assert len(lines) == 12
    assert lines[0].startswith("1 of 12, ")
    assert re.fullmatch(r"12 of 12, 0 min left; gsm8k: full 0\.0%, power .* 0\.0%", lines[-1])


# Continuing


@posix_only
@pytest.mark.ci
def test_a_killed_evaluation_continues(command, tmp_path):
    asked = ["--tasks", "gsm8k", "--fewshot", 0, "--batch-size", 2]
    run(*command, *asked)
    expected = by_problem(tmp_path / "out.jsonl")
    out = tmp_path / "killed.jsonl"
    arguments = [*command, *asked, "--out", out]
    process = subprocess.Popen(
        [sys.executable, "-m", "taper", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while process.poll() is None and not (out.exists() and out.read_text().count("\n") > 3):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = records(out)
    assert 3 <= len(done) < len(expected)
    with out.open("a") as file:
        file.write('{"task": "gsm8k", "prob')  # as if it had been writing
    run(*arguments)
    assert records(out)[: len(done)] == done
    assert by_problem(out) == expected


def test_more_problems_and_policies_extend_the_records(command, tmp_path):
    asked = [*command, "--tasks", "gsm8k", "--fewshot", 0]
    run(*asked, "--limit", 2)
    first = (tmp_path / "out.jsonl").read_text().splitlines()[1:]
    (tmp_path / "policy.json").write_text(DepthPolicy.early_exit(6, 5).to_json())
    text = run(*asked, "--limit", 3)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert lines[1 : len(first) + 1] == first
    assert len(lines) == 1 + 4 + 4  # one problem at full depth, three under the other policy
    assert "gsm8k: 3 problems" in text
    assert "gsm8k: 1 problem," in run(*asked, "--limit", 1)
    assert (tmp_path / "out.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--fewshot", 1], "was written with tasks"),
        (["--chat"], "was written with chat False, not True"),
        (["--max-tokens", 23], "was written with max_tokens 24, not 23"),
        (["--context", 500], "was written with context 512, not 500"),
        (["--dtype", "f16"], "was written with dtype 'f32', not 'f16'"),
        (["--seed", 1], "was written with seed 0, not 1"),
        (["--tasks", "gsm8k_cot_zeroshot"], "was written with tasks"),
        (["--policy", "other.json"], "was written with policy mine"),
    ],
)
def test_other_options_are_rejected_and_change_nothing(command, tmp_path, monkeypatch, changed, message):
    monkeypatch.chdir(tmp_path)
    named = json.loads(TAPERED.to_json()) | {"name": "mine"}
    (tmp_path / "policy.json").write_text(json.dumps(named))
    (tmp_path / "other.json").write_text(json.dumps(named | {"alpha": 0.8}))
    arguments = [*command, "--tasks", "gsm8k", "--fewshot", 0, "--limit", 1]
    run(*arguments)
    before = (tmp_path / "out.jsonl").read_text()
    if "--policy" in changed:  # it may be repeated, so it must take the place of the other one
        arguments[arguments.index("--policy") + 1] = changed.pop()
        changed.pop()
    with pytest.raises(RequestError, match=message) as error:
        run(*arguments, *changed)
    assert "give another file with --out" in str(error.value)
    assert (tmp_path / "out.jsonl").read_text() == before


def test_other_problems_are_rejected(command, data, tmp_path):
    arguments = [*command, "--tasks", "gsm8k", "--fewshot", 0, "--limit", 2]
    run(*arguments)
    other = write_data(tmp_path / "other", problems=2)
    lines = (other / "gsm8k" / "test.jsonl").read_text().splitlines()
    (other / "gsm8k" / "test.jsonl").write_text("\n".join([lines[0], lines[1].replace("nuts", "figs")]))
    arguments[arguments.index("--data-dir") + 1] = other
    with pytest.raises(RequestError, match=r"was written with other prompts or options \(gsm8k, problem 1\)"):
        run(*arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a line\n", "exists and holds no records"),
        ("no newline", "exists and holds no records"),
        ('{"format": 2}\n', "exists and holds no records"),
        (f"{HEADER}\nnonsense\n{{}}\n", "line 2 of .* is not a record"),
        (f'{HEADER}\n{{"task": "gsm8k"}}\nLAST\n', "line 2 of .* is not a record"),
        ("", None),
        (f"{HEADER}\n", None),
        (f'{HEADER}\n{{"task": "gs\n', None),
        (f'{HEADER}\n{{"task": "gs', None),
    ],
)
def test_a_damaged_last_line_is_dropped_and_a_file_that_is_not_ours_is_left_alone(tmp_path, content, message):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    if message is None:
        assert RecordFile(path, {"seed": 0}, {}, {}).records == {}
    else:
        with pytest.raises(RequestError, match=message):
            RecordFile(path, {"seed": 0}, {}, {})
    assert path.read_text() == content


def test_an_interrupted_evaluation_keeps_its_records_and_the_engine(llm, data, tmp_path):
    selection = load_tasks(["gsm8k"], fewshot=0, data_dir=data)
    seen = []

    def interrupt(*progress):
        seen.append(progress)
        if len(seen) == 3:
            raise KeyboardInterrupt

    options = {"max_tokens": 12, "out": tmp_path / "out.jsonl"}
    with pytest.raises(KeyboardInterrupt):
        evaluate(llm, selection, ["full", TAPERED], progress=interrupt, **options)
    assert llm.engine.num_free_slots == 3
    again = []

    def another(*progress):
        again.append(progress)
        if len(again) == 4:  # while this one is writing
            with pytest.raises(RequestError, match="another evaluation is writing"):
                evaluate(llm, selection, ["full", TAPERED], **options)

    evaluate(llm, selection, ["full", TAPERED], progress=another, **options)
    assert [was_there for _, _, was_there in again] == [True] * 3 + [False] * 9
    assert {total for _, total, _ in again} == {12}


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "gsm9k"], r"there is no task 'gsm9k' in lm-evaluation-harness \(did you mean gsm8k"),
        (["--tasks", ","], "--tasks is empty"),
        (["--tasks", "gsm8k", "--limit", "0"], "limit is 0; it must be a whole number of at least 1"),
        (["--tasks", "gsm8k", "--margin", "0"], r"margin is 0.0; it must be a number in \(0, 1\)"),
        (["--tasks", "gsm8k", "--margin", "100%"], r"margin is 1.0; it must be a number in \(0, 1\)"),
        (["--tasks", "gsm8k", "--modes", "exact"], "a mode is 'exact'; it must be one of full, taper"),
        (["--tasks", "gsm8k", "--modes", "full"], "--policy does nothing without mode taper"),
        (["--tasks", "gsm8k", "--fewshot", "7"], r"task gsm8k with 7 examples: .*lower --fewshot"),
        (["--tasks", "gsm8k_cot_zeroshot", "--fewshot", "2"], "gsm8k_cot_zeroshot is defined without examples"),
        (["--tasks", "gsm8k", "--max-tokens", "512"], "up to 512 tokens, but the context holds 512"),
        (["--tasks", "gsm8k", "--data-dir", "nowhere"], "--data-dir nowhere is not a folder"),
        (["--tasks", "bbh_cot_fewshot_snarks"], "there is no file .*snarks.json"),
        (["--tasks", "gsm8k", "--out", "."], r"--out \. is a folder or a device"),
        pytest.param(
            ["--tasks", "gsm8k", "--out", "/dev/full"], "--out /dev/full is a folder or a device", marks=posix_only
        ),
        pytest.param(["--tasks", "gsm8k", "--out", "/proc/out.jsonl"], "cannot write to /proc", marks=posix_only),
        (["--tasks", "gsm8k", "--policy", "none.json"], "none.json"),
    ],
)
def test_mistakes_are_one_line_each(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaperError, match=message) as error:
        run(*command, *arguments)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gsm8k/test.jsonl", "", "test.jsonl has no problems"),
        ("gsm8k/test.jsonl", '{"question": "1?", "answer": "1"}\n{', "line 2 of .*test.jsonl is not JSON"),
        ("gsm8k/test.jsonl", '{"question": 1, "answer": "2"}', 'problem 1 needs the texts "question" and "answer"'),
        ("gsm8k/train.jsonl", b"\xff\xfe", "train.jsonl is not UTF-8"),
        ("bbh/tasks/word_sorting.json", "{}", 'needs a list of "examples"'),
        ("bbh/tasks/word_sorting.json", "[]", "word_sorting.json has no problems"),
        ("bbh/tasks/word_sorting.json", '{"examples": ["a"]}', 'problem 1 needs the texts "input" and "target"'),
        ("bbh/tasks/word_sorting.json", "{", "word_sorting.json is not JSON"),
    ],
)
def test_damaged_data_is_named(tmp_path, name, content, message):
    folder = write_data(tmp_path / "data")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RequestError, match=message):
        load_tasks(["gsm8k", "bbh_cot_fewshot_word_sorting"], data_dir=folder)


def test_tasks_that_do_not_generate_are_rejected_before_their_data_is_fetched(monkeypatch):
    monkeypatch.setattr(tasks, "_QUICK_FOLDERS", ("arc", "winogrande"))
    for name in ("arc_easy", "winogrande"):
        with pytest.raises(RequestError, match=f"task {name} scores given answers .* no step to run with fewer"):
            load_tasks([name])


@posix_only
def test_a_full_disk_loses_nothing(llm, data, tmp_path):
    import resource

    selection = load_tasks(["gsm8k"], fewshot=0, data_dir=data)
    out, limits = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(record, total, was_there):
        resource.setrlimit(resource.RLIMIT_FSIZE, (out.stat().st_size + 10, limits[1]))

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(RequestError, match=r"cannot write .*out\.jsonl"):
            evaluate(llm, selection, ["full"], max_tokens=8, out=out, progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert out.read_text().count("\n") == 2  # the header, the first record, and 10 bytes of the next
    evaluate(llm, selection, ["full"], max_tokens=8, out=out)
    assert len(records(out)) == 6


def test_no_shipped_policy_for_the_model_is_one_line(command):
    at = command.index("--policy")
    with pytest.raises(TaperError, match="no shipped policy fits this model"):
        run(*command[:at], *command[at + 2 :], "--tasks", "gsm8k")


def test_without_the_harness_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(TaperError, match=r'pip install "taper-llm\[eval\]"'):
        load_tasks(["gsm8k"])


@pytest.mark.parametrize("is_installed", [True, False])
def test_mistakes_on_the_harness_own_command_line_are_one_line(monkeypatch, capsys, is_installed):
    if is_installed:  # then it knows our class
        monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: get_model("taper")(model="no such model"))
    else:
        monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(SystemExit) as end:
        harness_command.main()
    error = capsys.readouterr().err
    assert (end.value.code, error.count("\n"), error[:7]) == (2, 1, "taper: ")
