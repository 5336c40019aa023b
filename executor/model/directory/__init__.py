"""A model's directory: which files hold its weights, how they are read, and how a model is written."""
