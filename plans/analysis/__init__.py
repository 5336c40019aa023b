"""Analysis: what can be computed from a plan or a run, such as memory by role, wear, drift, and a step's waits."""
