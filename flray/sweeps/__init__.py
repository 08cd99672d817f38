"""Sweeps: many configurations of experiments, of which nothing is trained twice."""
