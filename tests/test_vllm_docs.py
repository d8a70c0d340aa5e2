"""The commands that docs/vllm.md shows work."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from taper import DepthPolicy
from taper.cli import cli
from taper.errors import PolicyError
from taper.models.policies import shipped_policies
from taper.vllm_plugin.options import PluginOptions, vllm_args

PAGE = Path(__file__).parent.parent / "docs" / "vllm.md"


def test_the_servers_shown_run_a_shipped_policy_on_its_own_model():
    commands = [line for line in PAGE.read_text().splitlines() if line.startswith("    eval ")]
    assert len(commands) == 2
    for command in commands:
        (model,) = re.findall(r"(?:vllm serve|--model) \S+/(\S+)", command)
        assert set(re.findall(r"--(?:policy|allow) ([\w-]+)", command)) == {"fast", "fast-plain"}
        assert {"fast", "fast-plain"} <= {policy.name for policy in shipped_policies()[model.lower()]}


def test_the_command_prints_flags_that_the_server_reads_back():
    printed = CliRunner().invoke(cli, ["vllm-args", "--policy", "fast", "--allow", "fast-plain"]).stdout
    words = shlex.split(printed)
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"architectures": ["TaperLlamaForCausalLM"]}
    config = json.loads(words[words.index("--additional-config") + 1])["taper"]
    options = PluginOptions.read(config, SimpleNamespace(num_hidden_layers=30, hidden_size=576, vocab_size=49152))
    assert options.default.name == "fast"
    assert set(options.named) == {"default", "full", "fast-plain"}
    for word in words:
        if word.startswith("--"):
            assert word in PAGE.read_text()


def test_a_policy_without_a_model_needs_the_architecture():
    policy = DepthPolicy.early_exit(8, 4)
    assert "TaperQwen3ForCausalLM" in vllm_args(policy, architecture="qwen3")[1]
    for architecture in (None, "gpt2"):
        with pytest.raises(PolicyError, match="architecture"):
            vllm_args(policy, architecture=architecture)
