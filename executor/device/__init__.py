"""The device that computes, the formats of its tensors, and what decides how its sums are rounded."""
