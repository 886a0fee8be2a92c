"""tests/budgets.py counts code, whatever its comments, docstrings and packing."""

import textwrap

import pytest

from tests import budgets

WRITTEN_OUT = '''
"""What a module is for,
in two lines."""

import os  # a comment beside code counts no more


class Account:
    """A docstring."""

    balance = 0
    """Text that nothing reads."""

    @property
    def text(self) -> str:
        """Three lines

        of a docstring."""
        # A comment.
        first = os.name

        second = """two
        lines"""
        return first + second
'''
NODES_OF_TEXTS = 4 * 2  # a statement and a constant for each docstring, and for the other text
# The same without these texts.
PACKED = """
import os
class Account:
    balance = 0
    @property
    def text(self) -> str: first = os.name; second = "two lines"; return first + second
"""


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a module and returns its file."""

    def write(code):
        file = tmp_path / "module.py"
        file.write_text(textwrap.dedent(code))
        return file

    return write


def test_lines_of_code_leave_out_comments_docstrings_and_blank_lines(write):
    assert budgets.num_code_lines(write(WRITTEN_OUT)) == 9


def test_packing_changes_the_density_but_not_the_size(write):
    num_nodes = budgets.num_nodes(write(WRITTEN_OUT))
    packed = write(PACKED)
    assert budgets.num_nodes(packed) + NODES_OF_TEXTS == num_nodes
    assert budgets.num_code_lines(packed) == 5


def test_density_is_the_nodes_of_a_line(write):
    # Assign, Name, Store and Constant in each line, and the Module.
    assert budgets.density(write("a = 1\n" * 20)) == (20 * 4 + 1) / 20
    assert budgets.density(write("a = 1\n" * 10)) == 0.0


def test_a_function_is_as_long_as_its_lines_without_decorators(write):
    assert budgets.longest_function(write(WRITTEN_OUT)) == 10
    assert budgets.longest_function(write("a = 1")) == 0


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("a = b = c", 1),
        ("a, b = x, y", 1),
        ("[a, self.b] = [x, y]", 1),
        ("def f():\n    a, b = b, a", 1),
        ("a = x, y", 0),
        ("a, b = f()", 0),
        ("for a, b in c:\n    d = a", 0),
    ],
)
def test_a_statement_that_assigns_several_values_is_counted(write, code, number):
    assert budgets.num_multiple_assignments(write(code)) == number
