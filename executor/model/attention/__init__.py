"""Attention of rows that several sequences share, or that a window limits, without a mask of every pair of tokens."""
