"""What a model's own forward does, found out by running it: whether it can be streamed exactly."""
