"""The decoder that a configuration names, without its weights and without a tokenizer.

A file of its own: it finds sizes without a network, where the library would fetch.
"""

from dapo_jax.config import ConfigError, ModelConfig
from dapo_jax.models.config_json import FAMILIES, WHAT_LOADS
from dapo_jax.models.folder import read_config
from dapo_jax.models.presets import PRESETS, DecoderConfig, preset
from dapo_jax.nearest import nearest
from dapo_jax.run.policy import folder_of, read_base

_PUBLISHERS = {"smollm2": "HuggingFaceTB/SmolLM2", "llama": "meta-llama/Llama", "qwen": "Qwen/Qwen"}
_KINDS = ("", "-base", "-instruct")
"""The text behind the size in the name of a repository whose weights have these shapes."""


def decoder_of(model: ModelConfig) -> DecoderConfig:
    """The sizes of `model.source`, the vocabulary as wide as the model's embedding.

    A model on the hub is known by its preset, and nothing is fetched.

    Raises:
        ConfigError: there is no such preset or folder, or nothing is known about the repository.
    """
    kind, _, name = model.source.partition(":")
    try:
        if kind == "hf":
            return _of_repository(name)
        # The vocabulary of a preset is its tokenizer's in a run; what is planned is the published model.
        if kind == "preset":
            return preset(name)
        return read_base(
            model,
            lambda base: read_config(folder_of(model, weights=False)) if base == model else decoder_of(base),
        )
    except ValueError as error:
        raise ConfigError(f"model.source={model.source!r}: {error}") from error


def _of_repository(name: str) -> DecoderConfig:
    repositories = {
        f"{_publisher(known)}{known.removeprefix(_family(known))}{kind}".lower(): known
        for known in PRESETS
        if _family(known)
        for kind in _KINDS
    }
    if name.lower() in repositories:
        return PRESETS[repositories[name.lower()]]
    near = nearest(name, repositories, least=0.0)[0]
    raise ValueError(
        f"the sizes of {name} are not known here, and planning fetches nothing; the nearest that is known is {near}. "
        f"If it is a model of a family that is covered ({', '.join(FAMILIES)}), name a folder with its config.json as model.source instead; {WHAT_LOADS}"
    )


def _family(known: str) -> str:
    return next((family for family in _PUBLISHERS if known.startswith(family)), "")


def _publisher(known: str) -> str:
    return _PUBLISHERS[_family(known)]
