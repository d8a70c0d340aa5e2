"""What docs/reliability.md promises of processes, signals and streams, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import pytest
from tiny import DEFAULT_MODEL_FILE

pty = pytest.importorskip("pty", reason="signals, forks and terminals of POSIX")

_LOAD = """
import os, signal, sys, threading, time
if hasattr(os, "sched_setaffinity"):  # a test has one core, on which two threads would wait for each other
    os.sched_setaffinity(0, range(os.cpu_count()))
from taper import LLM, DepthPolicy, SamplingParams
llm = LLM(sys.argv[1], threads=int(sys.argv[2]))
params, full = SamplingParams(max_tokens=6), DepthPolicy.full(llm.config.num_hidden_layers)
"""


def python(code: str, model: object, threads: int = 2) -> subprocess.CompletedProcess[str]:
    """A script that has loaded a model as `llm`."""
    command = [sys.executable, "-c", _LOAD + code, str(model), str(threads)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.ci
def test_a_fork_after_loading_is_one_line_in_the_child_and_nothing_in_the_parent(tiny_gguf):
    code = """
before = llm.generate("hi", params, policy=full).token_ids
if os.fork() == 0:
    try:
        llm.generate("hi", params, policy=full)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    sys.exit(7)
print("child ended with", os.waitstatus_to_exitcode(os.wait()[1]))
print(llm.generate("hi", params, policy=full).token_ids == before)
"""
    done = python(code, tiny_gguf)
    child, ended, same = done.stdout.splitlines()
    assert child.startswith("RequestError the model was loaded before this process was forked")
    assert (ended, same, done.stderr) == ("child ended with 7", "True", "")


def test_threads_of_one_process_do_not_end_it(tiny_gguf):
    code = """
alone = [llm.generate(f"prompt {i}", params, policy=full).token_ids for i in range(16)]
got = {}
def work(i):
    got[i] = llm.generate(f"prompt {i}", params, policy=full).token_ids
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print([got[i] for i in range(16)] == alone)
"""
    done = python(code, tiny_gguf, threads=1)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


@pytest.mark.ci
@pytest.mark.skipif(not DEFAULT_MODEL_FILE.is_file(), reason="fetch the default model with: taper pull")
def test_ctrl_c_in_a_long_prompt_ends_it_within_a_second_and_the_model_goes_on():
    """A chunk of the prompt takes seconds on one thread."""
    code = """
expected = llm.generate("hi", params, policy=full).token_ids
pressed = []
def press():
    time.sleep(0.7)
    pressed.append(time.perf_counter())
    for _ in range(3):  # more than once, as an impatient person would
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
threading.Thread(target=press).start()
try:
    llm.generate("long " * 3000, SamplingParams(max_tokens=1), policy=full)
    print("no interrupt")
except KeyboardInterrupt:
    ended = time.perf_counter()
    while True:  # until the last one has been delivered
        try:
            time.sleep(0.3)
            break
        except KeyboardInterrupt:
            pass
    print(ended - pressed[0])
print(llm.generate("hi", params, policy=full).token_ids == expected, llm.engine.num_free_slots)
"""
    done = python(code, DEFAULT_MODEL_FILE, threads=1)
    assert done.stderr == ""
    seconds, rest = done.stdout.splitlines()
    assert float(seconds) < 1
    assert rest == "True 8"


def test_a_batch_too_large_for_memory_names_the_batch_size(tiny_gguf):
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for size in (10**6, 10**18):
    try:
        LLM(sys.argv[1], max_batch_size=size)
    except Exception as error:
        print(type(error).__name__, error)
"""
    lines = python(code, tiny_gguf).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["RequestError"] * 2
    assert "memory for 1000000 outputs at a time of up to 1024 tokens" in lines[0]
    assert all("or max_batch_size" in line for line in lines)


def taper(arguments: str, *, shell: str = "", columns: str = "80") -> subprocess.CompletedProcess[str]:
    """A taper command in a shell, with redirections of its own."""
    line = f"'{sys.executable}' -m taper {arguments} {shell}"
    environment = {**os.environ, "COLUMNS": columns}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("options", "redirections"),
    [
        ("", ["", "2>/dev/full", "2>&-", "2> >(true)"]),
        pytest.param("--show-depth", ["", "2>/dev/full"], marks=pytest.mark.ci),
        pytest.param("--compare", ["2>/dev/full"], marks=pytest.mark.ci),
        pytest.param("--json", ["2>/dev/full"], marks=pytest.mark.ci),
    ],
)
def test_diagnostics_that_cannot_be_written_do_not_cost_the_output(tiny_gguf, options, redirections):
    command = f"generate hi --max-tokens 9 --temp 0 --threads 1 --model '{tiny_gguf}' --alpha 0.9 {options}"
    outputs = set()
    for redirection in redirections:
        line = f"bash -c \"'{sys.executable}' -m taper {command} {redirection}\""
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    (output,) = outputs
    assert output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_mistake_that_cannot_be_told_still_has_its_exit_code():
    assert taper("generate hi --model nowhere", shell="2>/dev/full").returncode == 2


@pytest.mark.parametrize(
    "columns", ["0", *(pytest.param(width, marks=pytest.mark.ci) for width in ("1", "7", "x", ""))]
)
def test_a_terminal_without_width_shows_a_comparison_all_the_same(tiny_gguf, columns):
    command = f"generate hi --max-tokens 9 --threads 1 --model '{tiny_gguf}' --alpha 0.9 --compare"
    assert "tokens/s" in taper(command, columns=columns).stdout


def test_text_of_a_model_reaches_a_terminal_without_escape_sequences_and_a_pipe_as_it_is(tiny_gguf, monkeypatch):
    """On a terminal of our own, with a model that writes what it should not."""
    evil = "one\x1b[2Jtwo\x1b]0;title\x07\x9b31mthree\x7f\r\tfour\n"
    code = f"""
import sys, taper.models.tokenizer
taper.models.tokenizer.TextStream.push = lambda self, token_id: {evil!r}
from taper.__main__ import run
sys.argv = ["taper", *"generate hi --max-tokens 2 --threads 1 --mode full --model".split(), {str(tiny_gguf)!r}]
run()
"""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the end of a terminal is an error
        while part := os.read(ours, 1000):
            shown += part
    process.wait(60)
    clean = "one[2Jtwo]0;title31mthree\tfour\n"
    assert clean in shown.decode().replace("\r\n", "\n")
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300).stdout
    assert evil in piped.decode()


@pytest.mark.ci
def test_a_signal_whose_handler_returns_costs_no_output_and_reaches_whoever_waits_for_it(tiny_gguf):
    """A graph that a signal ended is computed again, as a handler may do nothing but count."""
    code = """
prompts = [f"{i} " + "long " * 180 for i in range(6)]
def outputs():
    llm.generate([f"other {i}" for i in range(8)], params, policy=full)  # so that no slot holds these prompts
    return [llm.generate(prompt, params, policy=full).token_ids for prompt in prompts]
expected = outputs()
runner, completed = llm.engine.backend._compute, []
compute = runner.compute
runner.compute = lambda *args, **rest: completed.append(compute(*args, **rest)) or completed[-1]
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
counted, going = [], True
signal.signal(signal.SIGUSR1, lambda *_: counted.append(1))
def send():
    while going:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.003)
sender = threading.Thread(target=send)
sender.start()
got = outputs()
going = False
sender.join()
signal.set_wakeup_fd(-1)
numbers = os.read(read, 1 << 16)
print(got == expected, False in completed, set(numbers) == {signal.SIGUSR1}, len(numbers) >= len(counted) > 3)
"""
    done = python(code, tiny_gguf, threads=1)
    assert (done.stdout, done.stderr) == ("True True True True\n", "")


@pytest.mark.ci
def test_a_model_that_outlives_its_modules_ends_quietly(tiny_gguf):
    """Some libraries, datasets among them, hold the main module, so that its objects go last."""
    done = python("sys.holder = sys.modules['__main__']\nllm.generate('Hi', params, policy=full)", tiny_gguf)
    assert (done.returncode, done.stderr) == (0, "")
