"""What a document means as a sample: its format, its conversation, and what is to be said of it."""
