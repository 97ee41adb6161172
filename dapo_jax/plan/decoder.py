"""Finds the shapes of the configured model without its weights, its tokenizer or network access."""

from dapo_jax.config import ModelConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.hints import nearest
from dapo_jax.models.families import FAMILIES, WHAT_LOADS
from dapo_jax.models.folder import read_config
from dapo_jax.models.presets import PRESETS, DecoderConfig, preset
from dapo_jax.run.sources import folder_of, source_of

_PUBLISHERS = {
    "smollm2": "HuggingFaceTB/SmolLM2", "llama": "meta-llama/Llama", "qwen": "Qwen/Qwen", "gemma": "google/gemma", "gpt-oss": "openai/gpt-oss"
}  # fmt: skip
_REPOSITORIES = {
    f"{repository}{known.removeprefix(family)}{kind}".lower(): known
    for family, repository in _PUBLISHERS.items()
    for known in PRESETS
    if known.startswith(family)
    for kind in ("", "-base", "-instruct", "-it", "-pt")
}
_REPOSITORIES |= {
    name.replace("qwen2.5-", "qwen2.5-coder-"): known
    for name, known in _REPOSITORIES.items()
    if "qwen2.5-" in name
}
"""Maps each hub repository, in lower case, to the preset with the same shapes."""


def decoder_of(model: ModelConfig, *, section: str = "model") -> DecoderConfig:
    """Returns the decoder configuration of `model.source`. Its `vocab_size` is the number of rows in the model's embedding.

    Hub models are looked up among the presets. An unknown preset, folder or repository raises ConfigError, which names the `section`.
    """
    kind, _, name = model.parts.place.partition(":")
    with prefixed(f"{section}.source={model.source!r}"):
        if kind == "hf":
            if known := _REPOSITORIES.get(name.lower()):
                return PRESETS[known]
            raise ValueError(
                f"the shapes of {name} are unknown, and planning downloads nothing; the nearest known model is "
                f"{nearest(name, _REPOSITORIES, least=0.0)[0]}. If the model belongs to a supported family ({', '.join(FAMILIES)}), "
                f"set model.source to a folder with its config.json; {WHAT_LOADS}"
            )
        # A run of a preset uses its tokenizer's vocabulary size, but the plan uses the vocabulary size of the published model.
        if kind == "preset":
            return preset(name)
        return source_of(model).read(
            lambda base: read_config(folder_of(base, weights=False)) if base == model else decoder_of(base),
        )
