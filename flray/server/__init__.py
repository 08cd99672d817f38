"""The server: the one round loop, evaluation, checkpoints."""
