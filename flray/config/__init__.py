"""Experiments in YAML: reading, checking and building them."""
