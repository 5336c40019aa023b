"""How long rows are: the sequence length, or one of the few shorter lengths that padded micro-batches are given.

Owns that choice. Who trains makes rows of these lengths alone, and who profiles runs all of them: libraries keep code
that they made for every length that they met (oneDNN 6 to 13 MiB for the matrices of a model's layers, whatever their
size), so a length for each micro-batch would take more and more memory, and time for each new one.
"""

PARTS, MULTIPLE = (4, 2, 1), 16


def row_lengths(sequence_length: int) -> tuple[int, ...]:
    """The lengths that rows may have, in tokens, rising: a quarter of `sequence_length` and its half, rounded up to 16,
    and itself."""
    lengths = {min(-(-sequence_length // (part * MULTIPLE)) * MULTIPLE, sequence_length) for part in PARTS}
    return tuple(sorted(lengths))


def row_length(tokens: int, sequence_length: int) -> int:
    """The length of a micro-batch's rows of which the longest has so many tokens."""
    assert 0 < tokens <= sequence_length
    return next(length for length in row_lengths(sequence_length) if length >= tokens)
