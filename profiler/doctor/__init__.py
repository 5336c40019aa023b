"""The doctor: whether a machine and a directory are fit for training, and what mends what is not."""
