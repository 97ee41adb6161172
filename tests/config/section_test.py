"""Lists of mappings become objects; an invalid entry is named with its place in the list."""

from dataclasses import dataclass, field

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.config.section import entries


@dataclass(frozen=True, kw_only=True)
class Part:
    source: str
    weight: float = 1.0
    options: dict[str, int] = field(default_factory=dict)


def test_each_mapping_becomes_an_object_with_the_defaults_filled_in():
    made = entries("data.mixture", [{"source": "a"}, {"source": "b", "weight": 2}], Part)
    assert made == [Part(source="a"), Part(source="b", weight=2.0)]
    assert isinstance(made[1].weight, float)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sorce": "a"}, r"data.mixture\[1\].sorce: found 'a', .* did you mean source\?"),
        ({"zzz": "a"}, r"data.mixture\[1\].zzz.*its names are source, weight, options"),
        ({"weight": 2.0}, r"data.mixture\[1\]: found .*needs a source; write source"),
        ({"source": 3}, r"data.mixture\[1\].source: found 3, needs text"),
        ({"source": "a", "weight": "2"}, r"data.mixture\[1\].weight: found '2', needs a number"),
    ],
)
def test_an_invalid_entry_is_named_with_its_place(wrong, message):
    with pytest.raises(ConfigError, match=message):
        entries("data.mixture", [{"source": "a"}, wrong], Part)
