"""Lengths of rows: few, none longer than the sequence length, and never too short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdplan.plans.documents.rows import row_length, row_lengths


@pytest.mark.parametrize(
    ("sequence_length", "lengths"),
    [(2048, (512, 1024, 2048)), (128, (32, 64, 128)), (100, (32, 64, 100)), (20, (16, 20)), (16, (16,)), (2, (2,))],
)
def test_a_quarter_a_half_and_the_whole(sequence_length: int, lengths: tuple[int, ...]) -> None:
    assert row_lengths(sequence_length) == lengths


@given(st.integers(1, 10_000), st.data())
def test_the_least_length_that_the_tokens_fit_into(sequence_length: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, sequence_length))
    lengths, chosen = row_lengths(sequence_length), row_length(tokens, sequence_length)
    assert len(lengths) <= 3 and lengths[-1] == sequence_length
    assert chosen >= tokens and all(length < tokens for length in lengths if length < chosen)
