"""The runtime: what each operation of a graph does, and the runners that walk the graph."""
