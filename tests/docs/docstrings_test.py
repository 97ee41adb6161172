"""Docstrings are written in Markdown, and Sphinx reads them as reStructuredText."""

from _made.docstrings import restructured
from _made.formulas import plain


def test_code_formulas_and_links_are_translated():
    assert restructured(["Takes `x`, and $d = a$: see [it](https://a.b/c)."]) == [
        "Takes ``x``, and :math:`d = a`: see `it <https://a.b/c>`__."
    ]


def test_a_word_may_continue_after_code():
    assert restructured(["Two `Array`s, `a`."]) == ["Two ``Array``\\ s, ``a``."]


def test_examples_stay_as_they_are():
    lines = [">>> f('`x`')", "'$5 and $6'", "", "`y`"]
    assert restructured(lines) == [*lines[:3], "``y``"]


def test_a_table_becomes_a_list_table():
    text = "\n".join(restructured(["| a | b |", "|---|---|", "| `x` | |"]))
    assert ".. list-table::" in text
    assert "   * - a\n     - b\n   * - ``x``\n     -" in text


def test_a_formula_of_several_lines_is_one():
    assert restructured(["$$ a", "   + b $$"]) == ["", ".. math:: a    + b".replace("    ", " "), ""]


def test_formulas_use_commands_that_the_site_understands():
    assert plain(r"\big( \hat A_i \big)", block=False) == "( Â_i )"
    assert plain(r"a, \qquad b", block=True) == r"\begin{aligned}a, \\ b\end{aligned}"
    assert plain(r"\texttt{old\_logprobs}", block=False) == r"\text{old_logprobs}"
