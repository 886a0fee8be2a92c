"""Errors of other packages are quoted in one short line."""

import pytest

from hf_fsdp_recipes.errors import summarize


@pytest.mark.parametrize(
    ("text", "first", "expected"),
    [
        ("Bad value.", None, "Bad value"),
        ("\n  Bad value:\n    7 is odd. Use 8.\n", None, "Bad value: 7 is odd. Use 8"),
        ("\n  Bad value:\n    7 is odd. Use 8.\n", "line", "Bad value"),
        ("\n  Bad value:\n    7 is odd. Use 8.\n", "sentence", "Bad value: 7 is odd"),
        ("", "line", "ValueError"),
        (" \n ", None, "ValueError"),
        ("x" * 999, None, "x" * 300),
    ],
)
def test_error_is_one_short_line(text, first, expected):
    assert summarize(ValueError(text), first) == expected
