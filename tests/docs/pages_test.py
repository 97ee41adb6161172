"""The generated parts of pages are up to date, so a checkout has the same text as the site."""

import pytest
from _made.pages import DOCS, MAKERS, drawn, included, made, pages, sources
from _made.wrapping import wrapped

from dapo_jax.data.builders.arithmetic import response_text


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_generated_parts_of_a_page_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert text == made(text), f"{page.name} is not up to date: run `python docs/renew.py`"


@pytest.mark.parametrize("page", sources(), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_prose_of_a_page_has_one_width(page):
    text = page.read_text(encoding="utf-8")
    assert text == wrapped(text), f"{page.name} has lines of another width: run `python docs/renew.py`"


def test_wrapping_keeps_code_and_lists_and_never_begins_a_line_with_a_mark():
    """18 words of 9 letters, with 17 spaces, fill 179 of 180 columns. A mark after them would begin the next line, so the last word goes with it."""
    word = "ninechars "
    assert wrapped(f"{word * 20}\n") == f"{word * 18}".rstrip() + f"\n{word * 2}".rstrip() + "\n"
    kept = "```sh\n" + "long " * 50 + "\n```\n\n    " + "code " * 50 + "\n\n| " + "cell " * 50 + "|\n"
    assert wrapped(kept) == kept
    assert wrapped(f"* {word * 20}\n").splitlines()[1] == f"  {word * 3}".rstrip()
    assert wrapped(f"{word * 18}- a\n") == f"{word * 17}".rstrip() + f"\n{word}- a\n"


def test_a_part_is_generated_again_and_the_text_around_it_stays():
    kept = (
        "a\n<!-- made: keys SftConfig -->\n{}<!-- end -->\nb\n<!-- made: command_line -->\n{}<!-- end -->\n"
    )
    expected = kept.format(f"\n{MAKERS['keys']('SftConfig')}\n", f"\n{MAKERS['command_line']()}\n")
    assert made(kept.format("", "")) == made(kept.format("old\n", "older\n\n")) == made(expected) == expected


def test_wrong_marks_are_errors():
    with pytest.raises(KeyError, match="nothing"):
        made("<!-- made: nothing -->\n<!-- end -->")
    for text in ("<!-- made: command_line -->", "<!-- end -->", "a <!-- made: command_line -->\n<!-- end -->",
                 "<!-- made: keys SftConfig -->\n<!-- made: command_line -->\n<!-- end -->"):  # fmt: skip
        with pytest.raises(ValueError, match="needs an <!-- end -->"):
            made(text)


def test_links_to_a_file_outside_docs_lead_to_the_page_that_includes_it():
    page = DOCS / "results" / "trl" / "README.md"
    text = "[a](../../../benchmarks/README.md#b) [c](../index.md) [d](https://e.f/g.md)"
    assert included(text, page) == "[a](../benchmarks.md#b) [c](../index.md) [d](https://e.f/g.md)"


def test_a_drawing_is_embedded_in_the_page():
    shown = drawn("a\n\n![the pipe](_static/pipe.svg)\n\n![a](_static/no.png)\n")
    assert shown.startswith("a\n\n```{raw} html\n<svg ")
    assert shown.endswith("</svg>\n```\n\n![a](_static/no.png)\n")


@pytest.mark.parametrize("name", ["start.md", "write_a_reward.md"])
def test_working_is_shown_as_the_quickstart_writes_it(name):
    assert response_text(47, 85, "working") in (DOCS / name).read_text(encoding="utf-8")
