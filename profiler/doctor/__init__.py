"""The doctor: checks whether a machine and a directory are fit for training, and names the fix of each problem."""
