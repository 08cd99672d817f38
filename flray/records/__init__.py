"""What a run leaves behind: its directory, its environment, its checkpoints.

`RunDirectory` (`run_directory.py`) is what other packages use. Everything is written in full or not
at all, read back with checks, and enough to resume, tabulate, draw and export a run.
"""
