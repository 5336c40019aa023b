"""What a run says of itself: metrics.jsonl, report.json, TensorBoard and Weights & Biases."""
