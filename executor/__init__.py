"""The executor: trains a model by a plan. It starts in `train`; each room below owns one thing that a run needs."""
