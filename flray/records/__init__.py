"""What a run leaves behind: its directory, its environment, its checkpoints."""
