"""What the papers printed: their tables as YAML, read in one shape."""

from flray.reports.published.tables import Table, check_tables, find_table, load_tables

__all__ = ["Table", "check_tables", "find_table", "load_tables"]
