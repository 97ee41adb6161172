"""A name that is not known is answered with the known ones most like it."""

from dapo_jax.nearest import nearest


def test_a_word_is_matched_in_any_case_or_not_at_all():
    assert nearest("BFLOAT", ("float32", "bfloat16")) == ["bfloat16"]
    assert nearest("bf16", ("FLOAT32", "BFloat16")) == ["BFloat16"]
    assert nearest("xyz", ("float32", "bfloat16")) == []


def test_one_is_always_offered_where_any_likeness_will_do():
    assert nearest("xyz", ("float32", "bfloat16"), least=0.0) != []


def test_the_best_comes_first_and_no_more_than_asked_for():
    assert nearest("math", ("maths", "moth", "path", "gsm8k"), count=2) == ["maths", "path"]
