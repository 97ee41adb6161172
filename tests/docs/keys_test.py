"""The page of keys has every key, and agrees with the dataclasses."""

import dataclasses
import re
import typing

import pytest
from _made import keys

from dapo_jax import config
from dapo_jax.config.section import Section, field_types
from tests.docs.blocks import ROOT

SCHEMAS = ("TrainConfig", "SftConfig", "EvaluateConfig")


def names_below(value, name=""):
    """Returns the dotted names of an object's fields, from the object and not from its class."""
    found = []
    for field in dataclasses.fields(value):
        inner, of = f"{name}.{field.name}".lstrip("."), getattr(value, field.name)
        found += names_below(of, inner) if dataclasses.is_dataclass(of) else [inner]
    return found


@pytest.mark.parametrize(
    ("schema", "whole"),
    [
        ("TrainConfig", config.TrainConfig(run_dir="out")),
        ("SftConfig", config.SftConfig(run_dir="out")),
        ("EvaluateConfig", config.EvaluateConfig()),
    ],
)
def test_every_key_of_an_object_is_on_the_page_with_its_default(schema, whole):
    found = keys.all_keys(getattr(config, schema))
    page = keys.markdown(schema) if schema == "TrainConfig" else keys.markdown_beside(schema)
    for name in names_below(whole):
        assert f"| `{name}` | " in page or re.search(rf"in training: .*`{re.escape(name)}`", page), name
        value = whole
        for part in name.split("."):
            value = getattr(value, part)
        assert found[name].default == ("" if name == "run_dir" else keys.written(value))


@pytest.mark.parametrize(
    "schema", sorted(Section.__subclasses__(), key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__
)
def test_the_entries_of_every_list_of_mappings_are_described(schema):
    for name, kind in field_types(schema).items():
        if kind == list[dict[str, typing.Any]] or kind == list[dict[str, str]]:
            assert f"{schema.place}.{name}" in keys.ENTRIES


def test_every_range_and_choice_is_on_the_page():
    described = (
        keys.all_keys(config.SftConfig)
        | keys.all_keys(config.EvaluateConfig)
        | keys.all_keys(config.TrainConfig)
    )
    for key in described.values():
        is_number = key.kind.startswith(("integer", "number"))
        assert bool(key.needs) == bool(key.rules.choices or (is_number and key.rules.range))
    assert "`token_sum_norm`" in described["loss.aggregation"].needs
    assert "more than 0 and at most 1" in described["loss.clip_ratio_low"].needs


def test_a_key_has_the_text_below_its_field_and_its_place_in_the_paper():
    key = keys.all_keys(config.TrainConfig)["loss.clip_ratio_low"]
    assert (key.kind, key.default, key.text, key.paper) == (
        "number",
        "0.2",
        "Lower clip range, eps_low in Eq. 8.",
        ("Eq. 8",),
    )


def test_every_key_is_described():
    for schema in SCHEMAS:
        assert [name for name, key in keys.all_keys(getattr(config, schema)).items() if not key.text] == []


@pytest.mark.parametrize(("page", "least"), [("paper.md", 20), ("glossary.md", 30)])
def test_keys_in_the_text_of_a_page_exist(page, least):
    known = keys.all_keys(config.TrainConfig)
    sections = {name.partition(".")[0] for name in known if "." in name}
    code = {text.partition("=")[0] for text in re.findall(r"`([^`]+)`", (ROOT / "docs" / page).read_text())}
    named = {
        text
        for text in code
        if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", text) and text.partition(".")[0] in sections
    }
    assert len(named) > least
    assert not named - known.keys()
