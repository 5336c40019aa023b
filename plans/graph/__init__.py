"""The graph: buffers, regions and operations, their places in memory, what waits for what, and the check of it all."""
