"""The profiler: measures a machine and a model, and writes a Profile."""
