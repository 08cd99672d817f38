"""Measures: how good models, partitions and clusterings are."""
