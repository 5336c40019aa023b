"""Comparisons of our parts with their rivals on this machine."""
