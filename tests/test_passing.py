"""States that wait for keys and values: whatever comes between, what is read is what each step would have written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_filled import TURNS, converse
from tiny import BACKENDS, make_backend, make_tiny, policies, with_adapters

from taper.adapters import Adapters
from taper.backends import TokenBatch, passing
from taper.backends.passing import PassingStates
from taper.engine import Engine

LAYERS, SLOTS, LENGTH = 6, 2, 12
LENDER, BORROWER = 2, 4
Cells = dict[tuple[int, int, int], object]  # by layer, slot and position


@pytest.fixture(scope="module")
def config(tiny_llama):
    found = tiny_llama.load().config
    specs = [replace(spec, cells_of=LENDER if layer == BORROWER else None) for layer, spec in enumerate(found.layers)]
    return replace(found, layers=tuple(specs[:LAYERS]))


class Eager:
    """Writes all cells in each step; the state of a token is what it has passed."""

    def __init__(self, config) -> None:
        self.config, self.cells, self.steps = config, Cells(), 0

    def forward(self, batch: TokenBatch) -> list[object]:
        """What the tokens attend to, in their layers."""
        self.steps += 1
        states = [(self.steps, token) for token in range(len(batch.tokens))]
        read = []
        for layer in range(batch.first_layer, LAYERS):
            active = batch.num_active[layer]
            for token, (slot, position) in enumerate(zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)):
                if layer != BORROWER and (token < active or batch.fill or layer == LENDER):
                    self.write(layer, token, active, slot, position, states[token])
                if token < active:
                    cells = [self.cells.get((self.config.source(layer), slot, p)) for p in range(position)]
                    read.append((layer, slot, cells))
            adapted = batch.adapters is not None and layer in batch.adapters.layers
            states = [(layer, s) if t < active or adapted else s for t, s in enumerate(states)]
            self.left(batch, layer + 1, states)
        return read

    def write(self, layer: int, token: int, active: int, slot: int, position: int, state: object) -> None:
        self.cells[layer, slot, position] = layer, state

    def left(self, batch: TokenBatch, layer: int, states: list[object]) -> None:
        pass

    def copy(self, source: int, target: int, end: int) -> None:
        for layer in range(LAYERS):
            for position in range(end):
                self.cells[layer, target, position] = self.cells.get((layer, source, position))


class Lazy(Eager):
    """Lets states wait."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.passing, self.buffer = PassingStates(config), dict[int, object]()

    def forward(self, batch: TokenBatch) -> list[object]:
        self.plan = self.passing.plan(batch, self.write_waiting)
        self.left(batch, batch.first_layer, [(self.steps + 1, token) for token in range(len(batch.tokens))])
        read = super().forward(batch)
        self.passing.note(batch, self.plan)
        return read

    def write(self, layer: int, token: int, active: int, slot: int, position: int, state: object) -> None:
        if self.plan is None or token < active or layer == LENDER:
            super().write(layer, token, active, slot, position, state)

    def left(self, batch: TokenBatch, layer: int, states: list[object]) -> None:
        if self.plan is not None:
            places = iter(self.passing.places(self.plan).tolist())
            for part in self.plan.parts:
                for token in range(part.first, part.end):
                    place = next(places)
                    if part.layer == layer:
                        self.buffer[place] = states[token]

    def write_waiting(self, layer, slots, positions, places) -> None:
        assert layer not in (LENDER, BORROWER)
        for slot, position, place in zip(slots.tolist(), positions.tolist(), places.tolist(), strict=True):
            self.cells[layer, slot, position] = layer, self.buffer[place]

    def copy(self, source: int, target: int, end: int) -> None:
        self.passing.settle(source, 0, end, self.write_waiting)
        self.passing.forget(target, 0, end)
        super().copy(source, target, end)


@st.composite
def steps(draw) -> list[tuple]:
    """How many tokens of each slot come, how far back they begin, what runs, and what is copied before."""
    tokens = st.integers(0, 3)
    return draw(
        st.lists(
            st.tuples(
                tokens,
                tokens,
                st.tuples(st.integers(0, 2), st.integers(0, 2)),
                st.lists(st.integers(0, 6), min_size=LAYERS, max_size=LAYERS),
                st.booleans(),
                st.sampled_from([(), (1,), (0, 3)]),
                st.sampled_from([None, None, None, (0, 1), (1, 0)]),
            ),
            max_size=20,
        )
    )


@given(steps=steps(), size=st.sampled_from([1, 3, 8, 40]))
def test_what_is_read_is_what_each_step_would_have_written(config, steps, size):
    lengths = [0] * SLOTS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passing, "MAX_STATES", size)
        eager, lazy = Eager(config), Lazy(config)
    assert lazy.passing.size == size
    for *counts, back, active, fill, adapted, copied in steps:
        if copied:
            source, target = copied
            for each in (eager, lazy):
                each.copy(source, target, lengths[source])
            lengths[target] = lengths[source]
        starts = [max(0, length - step) for length, step in zip(lengths, back, strict=True)]
        counts = [min(count, LENGTH - start) for count, start in zip(counts, starts, strict=True)]
        if not sum(counts):
            continue
        slots = np.repeat(np.arange(SLOTS), counts)
        positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, counts, strict=True)])
        lengths = [start + n for start, n in zip(starts, counts, strict=True)]
        num_active = tuple(min(n, len(slots)) for n in active)
        adapters = Adapters({layer: (np.zeros((1, 1)), np.zeros((1, 1))) for layer in adapted}) if adapted else None
        batch = TokenBatch(slots, positions, slots, num_active, adapters=adapters, fill=fill)
        assert lazy.forward(batch) == eager.forward(batch)


@pytest.mark.parametrize("size", [1, 9])
@BACKENDS
def test_with_little_room_later_turns_are_the_same(tiny_llama, kind, size, monkeypatch):
    """States are written out in the midst of outputs, or do not wait at all."""
    every = policies(6)
    chosen = [*every.values(), with_adapters(every["d3"], 64)]
    expected = [converse(Engine(make_backend(kind, tiny_llama.load())), policy) for policy in chosen]
    monkeypatch.setattr(passing, "MAX_STATES", size)
    for policy, turns in zip(chosen, expected, strict=True):
        engine = Engine(make_backend(kind, tiny_llama.load()))
        assert engine.backend._passing.size == size
        assert converse(engine, policy, TURNS) == turns, policy.label


@BACKENDS
def test_outputs_that_nobody_continues_never_project_what_passed(tmp_path, kind, monkeypatch):
    engine = Engine(make_backend(kind, make_tiny(tmp_path).load()))
    written = []
    write = engine.backend._write_cells
    monkeypatch.setattr(
        engine.backend, "_write_cells", lambda layer, *places: (written.append(layer), write(layer, *places))
    )
    converse(engine, policies(5)["static"], TURNS[:1])
    assert not written
    converse(engine, policies(5)["static"], TURNS[:2])
    assert written
