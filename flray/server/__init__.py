"""The server: the round loop, evaluation and summary of a run, and the server as a Ray actor."""
