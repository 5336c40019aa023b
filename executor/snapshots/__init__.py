"""What a run leaves and goes on from: its directory, its snapshots, its claims and its exported model."""
