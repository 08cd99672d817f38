"""Tasks of clients: training, scores, judgements, predictions, signatures of their data."""
