"""The documents: profile, plan and sweep, the state layout, and the rules by which all are read and written."""
