"""The executor: trains a model by a plan. It starts in `train.py`; each folder owns one thing that a run needs."""
