"""Engines: a block of clients in, trained models out."""
