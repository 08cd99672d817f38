"""The registry of measures: names, columns, and the way of a new measure into a run."""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar

import numpy as np

from flray import measures
from flray.columns import Column
from flray.measures.measure import Measure
from flray.measures.settings import Evaluation


def test_columns_belong_to_one_measure_and_stand_with_their_note() -> None:
    kinds = measures.MEASURES.values()
    assert sum(len(kind.columns) for kind in kinds) == len(measures.MEASURE_COLUMNS)
    notes = [column.note for column in measures.MEASURE_COLUMNS.values()]
    changes = sum(a != b for a, b in pairwise(notes))
    assert changes == len(set(notes)) - 1


def test_measures_with_a_key_are_off_by_default() -> None:
    keys = {field.name for field in fields(Evaluation)} & measures.MEASURES.keys()
    assert keys == {"similarity", "drift", "robustness"}
    on = {type(measure) for measure in Evaluation().measures}
    assert on == {kind for name, kind in measures.MEASURES.items() if name not in keys}


@dataclass(frozen=True)
class LargestCluster(Measure):
    columns: ClassVar = {"largest": Column("largest cluster", decimals=0)}

    def __call__(self, context):
        return {"largest": int(np.bincount(context.clustering.labels).max())}


def test_a_new_measure_is_recorded_and_summarised(tiny_run, monkeypatch) -> None:
    monkeypatch.setitem(measures.MEASURES, "largest", LargestCluster)
    monkeypatch.setitem(measures.MEASURE_COLUMNS, "largest", LargestCluster.columns["largest"])
    result = tiny_run("algorithm={name: flhc, rounds_before: 1}", "rounds=2")
    recorded = result.rounds["clustering_largest"].dropna()
    assert len(recorded) == 1
    assert 1 <= recorded.iloc[0] == result.summary["largest"] <= 6
