"""Ranks: the processes that train together, and what passes between them."""
