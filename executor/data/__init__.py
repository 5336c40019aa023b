"""The training text: files in, rows of token ids and labels out.

A run uses `TextData` of `text_data.py`: the samples of a step, as a pure function of its number. Below it

- files become documents (`reading/`),
- documents become samples of a format (`samples/`),
- samples become tokens, each learnt or not (`rendering.py`, `frame.py`, `tokens.py`), kept on disk (`tokenising.py`,
  `token_cache.py`),
- samples become rows (`packing.py`).

`preview.py` shows them to people. `apart.py` bounds what untrusted content may cost: it runs the work in a process of
its own and watches that. `reader.py` reads so for a run, and `previewing.py` makes a preview so. Nothing here knows a
plan or a model, or imports torch.
Importing this package imports nothing, so that a command that only names the formats starts at once.
"""
