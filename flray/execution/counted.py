"""What the meter of a federation counts: columns of rounds.parquet."""

CLIENT_STEPS = "client_steps"
CLIENT_STEPS_EVALUATION = "client_steps_evaluation"
CLIENTS_DROPPED = "clients_dropped"
GROUND_TRUTH_READS = "ground_truth_reads"
PLACING_BYTES = "placing_bytes_down"
# Holdout clients that trained or judged models in a round, which takes labels, to be placed.
HOLDOUT_LABELS_READ = "holdout_labels_read"
