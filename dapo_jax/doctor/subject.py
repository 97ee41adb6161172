"""The configuration that the checks examine, and the model, data and plan that several checks share."""

from dataclasses import dataclass, replace
from functools import cached_property

from dapo_jax.config import DataConfig, ModelConfig, TrainConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.config.model_source import source_parts
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.models.folder import weights_of
from dapo_jax.models.hub import look_up
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.plan.plan import Plan, plan
from dapo_jax.plan.workload import Assumptions
from dapo_jax.run.prompt_sets import GivenRows, PromptSets, training_prompts, with_template_date
from dapo_jax.run.sources import source_of
from dapo_jax.storage import AnyPath, entries, size_of
from dapo_jax.text.tokenizers import Tokenizer

SUMS = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
STAND_IN = TrainConfig(
    run_dir=".",
    model=ModelConfig(source="preset:tiny", tokenizer="char:0123456789+="),
    data=DataConfig(source="rows", prompt_template="{prompt}="),
)
"""A run that trains a tiny model on sums, for checks that cannot use the user's own configuration or model."""


@dataclass(frozen=True)
class Subject:
    """The configuration to examine. The model's description and the data are loaded when a check first needs them."""

    config: TrainConfig = STAND_IN
    rows: GivenRows | None = None
    """Rows to use instead of the configured dataset."""
    right: str = ""
    """The format of a correct response, containing `{answer}`. If empty, several common formats are tried."""
    full: bool = False
    """Whether the tiny step uses the run's own model, however large it is."""

    @cached_property
    def described(self) -> tuple[DecoderConfig, Tokenizer, AnyPath | None, int, int]:
        """The model's shapes, tokenizer and folder, the size of its weights in bytes, and the number of its tensors that are not loaded. No weights are downloaded or loaded."""
        model, size, skipped = self.config.model, 0, 0
        with prefixed(f"model.source={model.source!r}"):
            source = source_of(model)
            parts, on_hub = source.base.parts, source.base.source.startswith("hf:")
            decoder, tokenizer, folder = source.described(weights=not on_hub)
            if source.is_whole_run:
                size = 4 * decoder.parameters  # a checkpoint stores float32
            elif on_hub:
                folder, size = look_up(parts.place.removeprefix("hf:"), revision=parts.revision or None)
            elif folder is not None:
                # Reading the names and shapes detects missing and truncated files.
                skipped = weights_of(folder, decoder).skipped
                size = sum(size_of(file) for file in entries(folder) if file.suffix == ".safetensors")
        return decoder, tokenizer, folder, size, skipped

    @property
    def tokenizer(self) -> Tokenizer:
        return self.described[1]

    @cached_property
    def planned(self) -> Plan:
        """The run's plan for this machine's devices, computed from shapes without compiling."""
        model, folder = self.config.model, self.described[2]
        if folder is not None:  # given a hub name, `plan` would use the shapes of a preset
            model = replace(model, source=str(folder))
        teacher = self.config.teacher
        if teacher.source.startswith("hf:"):
            place, revision, _ = source_parts(teacher.source)
            folder, _ = look_up(place.removeprefix("hf:"), revision=revision or None)
            teacher = replace(teacher, source=str(folder))
        return plan(replace(self.config, model=model, teacher=teacher), assumed=Assumptions(informative=1.0))

    @cached_property
    def training(self) -> PromptSets:
        """The prompts to train on, and notes about them."""
        data, seed = with_template_date(self.config.data), self.config.seed
        return training_prompts(data, self.tokenizer, seed=seed, rows=self.rows)

    def prompts(self, count: int) -> list[Prompt]:
        """Returns the first prompts that a run would sample."""
        source = self.training.training
        return [source[ordinal] for ordinal in range(min(count, source.rows_per_epoch))]
