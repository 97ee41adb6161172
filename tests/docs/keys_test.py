"""The page of keys has every key, and agrees with the dataclasses."""

import dataclasses
import re

import pytest
from _made import keys

from dapo_jax import config
from dapo_jax.config.section import Section, field_types

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
        if "list[dict" in str(kind):
            assert f"{schema.place}.{name}" in keys.ENTRIES


def test_every_key_is_described():
    for schema in SCHEMAS:
        assert [name for name, key in keys.all_keys(getattr(config, schema)).items() if not key.text] == []
