"""What it takes to run a table: client SGD steps, from costs.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Cost:
    steps: int | None  # client SGD steps of the whole table, None where the note says why
    note: str


# Table -> (entry of costs.yaml, its total, what that total is).
TOTALS: Mapping[str, tuple[str, str | None, str]] = {
    "flhc.1": ("BRIGGS_I_II_each", "total", ""),
    "flhc.2": ("BRIGGS_I_II_each", "total", ""),
    "flhc.3": ("BRIGGS_III", "total", ""),
    "flhc.4": ("BRIGGS_IV_V_each", "total_one_threshold", "one threshold"),
    "flhc.5": ("BRIGGS_IV_V_each", "total_one_threshold", "one threshold"),
    "flhc.6": ("BRIGGS_VI", "total_one_threshold", "one threshold"),
    "flis.1": ("FLIS_I", "total_one_trial_two_skews", "one trial of three"),
    "flis.2": ("FLIS_II", "total_one_trial", "one trial of three"),
    "flis.3": ("FLIS_III", None, "none of its own: read off the runs of flis.1"),
    "flis.4": ("FLIS_IV", "total_one_trial_10_methods", "one trial of three"),
    "flt.1": ("FLT_I", "total", "without encoders"),
    "flt.2": ("FLT_II", "total", "without encoders"),
    "flt.3": ("FLT_III", "total_8_rows_plus_ifca_rho0_2", "participation 0.2"),
    "flt.4": ("FLT_IV", "total_E5", "5 epochs"),
    "flt.5": (
        "FLT_V",
        "total_3_methods_T50_read_from_T100_runs",
        "T = 50 read off the runs of T = 100",
    ),
    "flt.6": ("FLT_VI", "total", "formulas"),
    "flt_workshop.1": ("FLT_workshop_1_2", None, "none of its own: a subset of flt.3"),
    "flt_workshop.2": ("FLT_workshop_1_2", None, "none of its own: a subset of flt.4"),
    "flt_workshop.3": ("FLT_VI", "total", "formulas"),
    "repa.1": ("REPA", "table1_estimate", "an estimate"),
}


def read_costs(path: Path) -> dict[str, Cost]:
    """The cost of each table in TOTALS."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["tables"]
    return {
        table: Cost(None if total is None else _sum(entries[entry][total]), note)
        for table, (entry, total, note) in TOTALS.items()
    }


def unused_entries(path: Path) -> list[str]:
    """Entries of costs.yaml that no table refers to."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["tables"]
    return sorted(set(entries) - {entry for entry, _, _ in TOTALS.values()})


def _sum(total: Any) -> int:  # Any: YAML, a number or one for each dataset or model
    return sum(total.values()) if isinstance(total, dict) else int(total)
