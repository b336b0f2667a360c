"""Counts of lines and names in sources with known answers, and fits of counts with known formulas."""

import pytest

from axcore_loc.fit import fit
from axcore_loc.lines import changed_lines, code_lines, mentions

SOURCE = '''"""About rope."""
# rope

import rope.scaling as scaled


class Layer:
    """Uses rope."""

    rope: int = 3
    """rope, described."""

    def run(self, rope_theta, *, other):  # rope
        return (
            self.inner
            .rope(rope_theta, rope=other)
        )


NAMES = ["rope", "no rope here"]
'''


def test_code_lines_exclude_blanks_comments_and_docstrings():
    assert code_lines(SOURCE) == [
        "import rope.scaling as scaled",
        "class Layer:",
        "rope: int = 3",
        "def run(self, rope_theta, *, other):  # rope",
        "return (",
        "self.inner",
        ".rope(rope_theta, rope=other)",
        ")",
        'NAMES = ["rope", "no rope here"]',
    ]


def test_unparsable_source_still_has_lines():
    assert code_lines("print 'old python'\n\n# no\nx = 1\n") == ["print 'old python'", "x = 1"]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("a = 1\nb = 2\n", "a = 1\nb = 2\n", 0),
        ("a = 1\n", "a = 1\nb = 2\nc = 3\n", 2),  # added
        ("a = 1\nb = 2\n", "a = 1\n", 1),  # removed
        ("a = 1\nb = 2\n", "a = 1\nb = 3\n", 1),  # replaced, once
        ("a = 1\nb = 2\n", "a = 1\nx = 3\ny = 4\nz = 5\n", 3),  # one replaced, two added
        ("a = 1\n", '"""About."""\n\n# a comment\na = 1\n', 0),
        ("a = 1\n", "if x:\n    a = 1\n", 1),  # indentation does not count
        ("", "a = 1\n", 1),
    ],
)
def test_changed_lines(before, after, lines):
    assert changed_lines(before, after) == lines


def test_mentions_are_names_of_the_syntax_tree():
    found = mentions(SOURCE, lambda name: name in ("rope", "rope_theta"))
    assert found == {
        4: {"rope"},  # an import
        10: {"rope"},  # a field
        13: {"rope_theta"},  # an argument
        16: {"rope", "rope_theta"},  # an attribute on its own line, a name, a keyword
        20: {"rope"},  # a string without spaces
    }


def test_mentions_of_definitions_and_aliases():
    source = "from a.rope import b as moe\nasync def rope(): ...\nclass moe: ...\ndef f(x, moe=1): ...\n"
    assert mentions(source, {"rope", "moe"}.__contains__) == {1: {"rope", "moe"}, 2: {"rope"}, 3: {"moe"}, 4: {"moe"}}


def grid(formula, models=6, slots=4):
    return {(n, m): formula(n, m) for n in range(1, models + 1) for m in range(1, slots + 1)}


@pytest.mark.parametrize(
    ("formula", "factors", "order"),
    [
        (lambda n, m: 0, (0, 0, 0, 0), "O(1)"),
        (lambda n, m: 7, (7, 0, 0, 0), "O(1)"),
        (lambda n, m: 3 * n + 1, (1, 3, 0, 0), "O(N)"),
        (lambda n, m: 2 * m, (0, 0, 2, 0), "O(M)"),
        (lambda n, m: n + 2 * m, (0, 1, 2, 0), "O(N + M)"),
        (lambda n, m: 5 + n + n * m, (5, 1, 0, 1), "O(NM)"),
    ],
)
def test_fit_finds_the_formula(formula, factors, order):
    found = fit(grid(formula))
    assert (found.constant, found.per_model, found.per_slot, found.per_pair) == pytest.approx(factors, abs=1e-6)
    assert found.order == order
    assert found.residual == pytest.approx(0, abs=1e-6)


def test_models_may_cost_different_numbers_of_lines():
    costs = [2, 3, 2, 2, 4, 2, 3, 2]
    found = fit(grid(lambda n, m: sum(costs[:n]), models=8))
    assert found.order == "O(N)"
    assert 0 < found.residual < 2
    assert (found.per_slot, found.per_pair) == pytest.approx((0, 0), abs=1e-6)


def test_one_line_in_one_model_of_twenty_is_detected():
    assert fit(grid(lambda n, m: int(n == 20), models=20, slots=10)).order != "O(1)"


def test_counts_of_another_form_are_neither():
    assert fit(grid(lambda n, m: 2**n)).order == "neither"


def test_too_few_counts_are_rejected():
    with pytest.raises(ValueError, match="two values of n crossed with two of m"):
        fit({(1, 1): 0, (2, 2): 1, (3, 3): 2, (4, 4): 3, (5, 5): 4})
