"""The training text: files in, rows of token ids and labels out.

`text_data.TextData` is what a run uses: the samples of a step, as a pure function of its number. Below it files become
documents (`documents`, `columns`), documents samples of a format (`formats`), these tokens with what is learnt of them
(`rendering`, `tokens`), tokens a cache on disk (`tokenising`, `token_cache`), and samples rows (`packing`). `preview`
shows them to people. A process of its own, which is watched, bounds what content of others may cost (`apart`;
`previewing` has a preview made in one). Nothing here knows of a plan or a model, or imports torch; and nothing is
imported by importing this package, so that a command that only names the formats starts at once.
"""
