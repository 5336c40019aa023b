"""A run's metrics: metrics.jsonl, report.json, TensorBoard and Weights & Biases."""
