"""What a schedule takes: seconds by the simulator, bytes by tier, and the critical path."""
