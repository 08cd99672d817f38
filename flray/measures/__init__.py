"""Measures: numbers of clients, of partitions and of clusterings.

`MEASURES` is the registry of what is measured of a clustering. A new measure is one file with a
`Measure`, one line here and, unless it is always on, a field of that name in `Evaluation`
(`settings.py`), which is its key in YAML.
"""

from flray.columns import Column
from flray.measures.drift import Drift
from flray.measures.ground_truth import LabelSets, PlantedGroups
from flray.measures.label_similarity import LabelSimilarity
from flray.measures.measure import Measure
from flray.measures.robustness import Robustness

MEASURES: dict[str, type[Measure]] = {
    "label_sets": LabelSets,
    "planted_groups": PlantedGroups,
    "similarity": LabelSimilarity,
    "drift": Drift,
    "robustness": Robustness,
}


def _columns() -> dict[str, Column]:
    columns = {key: column for kind in MEASURES.values() for key, column in kind.columns.items()}
    notes = list(dict.fromkeys(column.note for column in columns.values()))
    return dict(sorted(columns.items(), key=lambda item: notes.index(item[1].note)))


MEASURE_COLUMNS = _columns()  # for summaries and tables; columns with one note are adjacent
