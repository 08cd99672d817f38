"""Tables of the papers as YAML, and which runs fill which of their cells."""

from flray.reports.published.tables import Table, find_table, load_tables

__all__ = ["Table", "find_table", "load_tables"]
