"""The optimizer: AdamW on ranges, learning rates, weight decay and the loss scale."""
