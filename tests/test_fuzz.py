"""Mutated files of every kind are refused with one line, or load and run: `fuzz.py`, a process for each kind."""

from __future__ import annotations

import fuzz
import pytest

COUNT = 200  # of each kind; more are run by hand, with `python tests/fuzz.py`


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    fuzz.make_models(folder)
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_any_mutation_of_a_file_is_refused_or_runs(kind, files):
    counts, failures = fuzz.run(kind, 0, COUNT, files)
    print(counts)
    assert failures == []
    assert counts["refused"] + counts["loaded"] == COUNT
    assert counts["refused"] > counts["loaded"] > 10
    assert counts["ran"] > 0
