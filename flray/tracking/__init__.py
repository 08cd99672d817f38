"""Where runs are shown beside their directories: W&B and TensorBoard."""
