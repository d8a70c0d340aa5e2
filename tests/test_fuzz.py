"""Mutated files of every kind are refused with one line, or load and run: `fuzz.py` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import fuzz


def test_any_mutation_of_a_file_is_refused_or_runs():
    command = [sys.executable, fuzz.__file__, "--count", "500"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = json.loads(process.stdout)
    print(report["counts"])
    assert report["failures"] == [], report["failures"]
    assert process.returncode == 0
    for kind in fuzz.KINDS:
        counts = report["counts"][kind]
        assert counts["refused"] + counts["loaded"] == 500
        assert counts["refused"] > counts["loaded"] > 10
        assert counts["ran"] > 0
