"""What a stopped run leaves, and goes on from: its directory, snapshots, claims and exported model."""
