"""What a run keeps in memory and in its store: states, their records, and their move to another plan."""
