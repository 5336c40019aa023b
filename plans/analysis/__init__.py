"""What can be said of a plan or a run: memory by role, wear, drift, and a measured step over the predicted one."""
