"""What an experiment will take, before it runs: `flray plan`."""
