"""Steps are filled up to few shapes, with at least one token for each sequence that is added."""

from __future__ import annotations

from ridgeline.runtime.padding import GRID, OFTEN, Shapes, Tokens, more_drafting

MOST, MOST_TOKENS = 32, 72


def test_drafting_sequences_have_few_shapes() -> None:
    found = set()
    for n in range(1, 32):
        for total in range(n, min(2 * n, MOST_TOKENS) + 1):
            more = more_drafting(n, total, MOST, MOST_TOKENS)
            assert all(length > 0 for length in more)
            count, tokens = n + len(more), total + sum(more)
            assert count <= MOST and tokens <= MOST_TOKENS
            if more:
                assert count in GRID and tokens % count == 0
            found.add((count, tokens))
    assert len(found) <= 30
    assert more_drafting(4, 8, MOST, MOST_TOKENS) == more_drafting(1, 2, MOST, MOST_TOKENS) == ()
    assert more_drafting(5, 10, MOST, MOST_TOKENS) == (2,)
    assert more_drafting(5, 10, 5, MOST_TOKENS) == ()


def test_steps_with_drafts_have_few_shapes_until_one_is_frequent() -> None:
    shapes, found = Shapes(range(1, MOST + 1), MOST, MOST_TOKENS), set()
    for total in range(5, 21):
        more = shapes.more(4, total)
        assert len(more) == bool(total % 4)
        found.add((4 + len(more), total + sum(more)))
    assert found == {(n, total) for n in (4, 5) for total in (8, 12, 16, 20)}
    for _ in range(OFTEN - 1):
        assert shapes.more(4, 13)
    assert shapes.more(4, 13) == ()
    assert shapes.more(4, 4) == shapes.more(1, 3) == shapes.more(32, 40) == shapes.more(15, 70) == ()


def test_sequences_are_added_with_token_zero_at_position_zero() -> None:
    given = Tokens([3, 1], [7, 0], [2, 1], [5, 6, 9], [1, 1, 0])
    assert given.with_more((1, 2), 8) == Tokens(
        [3, 1, 8, 8], [7, 0, 0, 0], [2, 1, 1, 2], [5, 6, 9, 0, 0, 0], [1, 1, 0, 0, 0, 0]
    )
    assert given._replace(frequency_rows=None).with_more((1,), 8).frequency_rows is None
