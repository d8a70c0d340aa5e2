"""Mutated files of every kind are refused with one line, or load and run: `fuzz.py` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import fuzz

COUNT = 200  # of each kind; more are run by hand, with `python tests/fuzz.py`


def test_any_mutation_of_a_file_is_refused_or_runs():
    command = [sys.executable, fuzz.__file__, "--count", str(COUNT)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = json.loads(process.stdout)
    print(report["counts"])
    assert report["failures"] == [], report["failures"]
    assert process.returncode == 0
    for kind in fuzz.KINDS:
        counts = report["counts"][kind]
        assert counts["refused"] + counts["loaded"] == COUNT
        assert counts["refused"] > counts["loaded"] > 10
        assert counts["ran"] > 0
