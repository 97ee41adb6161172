"""The page of keys has every key, and agrees with the dataclasses."""

import dataclasses
import re
import typing

import pytest
from _made import keys

from dapo_jax import config
from dapo_jax.config.section import Section

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
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if (
            typing.get_origin(hints[field.name]) is list
            and typing.get_origin(typing.get_args(hints[field.name])[0]) is dict
        ):
            assert f"{schema.place}.{field.name}" in keys.ENTRIES


def test_every_range_and_choice_is_on_the_page():
    described = {
        name: key for schema in SCHEMAS for name, key in keys.all_keys(getattr(config, schema)).items()
    }
    for key in described.values():
        assert bool(key.needs) == bool(key.rules.range or key.rules.choices)
    assert "`token_sum_norm`" in described["loss.aggregation"].needs
    assert "more than 0 and less than 1" in described["loss.clip_ratio_low"].needs


def test_a_key_has_the_text_below_its_field_and_its_place_in_the_paper():
    key = keys.all_keys(config.TrainConfig)["loss.clip_ratio_low"]
    assert (key.kind, key.default, key.text, key.paper) == ("number", "0.2", "eps_low of Eq. 8.", ("Eq. 8",))


def test_every_key_is_described():
    bare = [
        name
        for schema in SCHEMAS
        for name, key in keys.all_keys(getattr(config, schema)).items()
        if not key.text
    ]
    assert bare == []
