"""What `dapo-jax serve` refuses before JetStream has anything to do with it."""

import sys

import pytest

from dapo_jax.config import ConfigError
from dapo_jax.serving.serve import ServeOptions, serve


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dapo_jax.serving.server", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[jetstream\]'.*google-jetstream==0.2.2"):
        serve("shipped:quickstart", ServeOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots=0 must be at least 1"),
        ({"page_tokens": -1}, "page_tokens=-1 must be 0.*or more"),
        ({"port": 65536}, "port=65536 must be from 0"),
        ({"compute_dtype": "float16"}, "'float16' must be float32 or bfloat16"),
        ({"follow_s": 0.0}, "follow=0.0 must be more than 0"),
        ({"system_prompt": "Be brief."}, "give --chat too"),
    ],
)
def test_an_option_out_of_range_is_a_configuration_error(options, message):
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**options)
