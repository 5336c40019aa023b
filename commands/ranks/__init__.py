"""The ranks of a command: how many there are, how those of this machine start, and what they do before they begin."""
