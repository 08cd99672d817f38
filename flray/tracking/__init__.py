"""Where runs are shown beside their directories: W&B, TensorBoard, MLflow."""
