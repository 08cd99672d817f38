"""Runs: from a checked experiment to a server that runs it, wherever that is."""
