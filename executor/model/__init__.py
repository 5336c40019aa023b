"""A Hugging Face model as layers whose weights stream: what it consists of, and one layer's forward and backward."""
