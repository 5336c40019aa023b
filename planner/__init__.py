"""The planner: from a Profile to a Plan. It only computes: it never measures, runs or imports torch."""
