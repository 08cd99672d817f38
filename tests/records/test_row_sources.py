import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flray.records import row_sources
from flray.records.row_sources import RowSources, changed_rows, files_to_absorb


def test_rows_are_compared_in_chunks(monkeypatch):
    monkeypatch.setattr(row_sources, "CHUNK_BYTES", 40)  # two rows of 16 bytes at a time
    old = np.arange(28, dtype=np.float32).reshape(7, 4)
    for row in range(7):
        new = old.copy()
        new[row, 3] += 1
        assert np.flatnonzero(changed_rows(old, new)).tolist() == [row]


def test_files_to_absorb_by_hand(monkeypatch):
    monkeypatch.setattr(row_sources, "MAX_FILES", 3)
    full = {0: 100, 1: 10, 2: 10}
    assert files_to_absorb({0: 100, 1: 10}, full, 10) == []  # room for one more
    assert files_to_absorb(full, full, 10) == [1, 2]  # one must go, the other is as cheap
    assert files_to_absorb({0: 100, 1: 50, 2: 60}, full, 1) == [1]  # one must go, the rest is dear
    assert files_to_absorb({0: 100, 1: 4}, full, 3) == []  # mostly unused, but dear
    assert files_to_absorb(full, full, 0) == []  # no file will be written


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=12))
def test_pieces_say_where_each_row_lies(rows):
    rounds, places = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    sources = RowSources(rounds, places)
    back = RowSources.from_pieces(json.loads(json.dumps(sources.pieces())))
    assert back.rounds.tolist() == rounds.tolist()
    assert back.positions.tolist() == places.tolist()
