"""Loads the teacher of a run, whose log-probabilities the updates use."""

from dataclasses import replace

from jax.sharding import Mesh

from dapo_jax.config import ConfigError, ModelConfig, TrainConfig
from dapo_jax.run.policy import Policy, load_policy
from dapo_jax.run.resume_point import model_files
from dapo_jax.run.training_pass import training_pass
from dapo_jax.training.update import Model


def teacher_of(config: TrainConfig) -> ModelConfig:
    """Returns the teacher's model: the `model` section with `teacher.source`, `teacher.revision` and the last checkpoint."""
    teacher = config.teacher
    return replace(config.model, source=teacher.source, revision=teacher.revision, checkpoint="last")


def load_teacher(config: TrainConfig, student: Policy, mesh: Mesh) -> Policy:
    """Loads the teacher of a run, sharded over `mesh`.

    Raises:
        ConfigError: the teacher cannot be loaded, its tokenizer is not the tokenizer of the student, or it has fewer vocabulary entries.
    """
    longest = config.data.max_prompt_tokens + config.sampling.max_response_tokens
    teacher = load_policy(teacher_of(config), seed=config.seed, mesh=mesh, section="teacher", longest=longest)
    one, other = (model_files(a.folder, weights=False).get("tokenizer.json") for a in (student, teacher))
    if student.tokenizer != teacher.tokenizer:
        raise ConfigError(
            f"teacher.source={config.teacher.source!r} has another tokenizer than model.source={config.model.source!r}: sha256 of tokenizer.json "
            f"{other or '(no file)'} and {one or '(no file)'}. Token ids must have the same meaning in both: use a teacher of the same model family"
        )
    least, found = student.decoder.vocab_size, teacher.decoder.vocab_size
    if found < least:
        raise ConfigError(
            f"teacher.source={config.teacher.source!r} has {found} vocabulary entries, but the student may sample any of the {least} entries of "
            f"model.source={config.model.source!r}: use a teacher with at least {least} entries"
        )
    return teacher


def taught_by(config: TrainConfig, teacher: Policy, mesh: Mesh) -> Model:
    """Returns the decoder of a teacher for updates on `mesh`, and its parameters."""
    model = config.model
    how = training_pass(model, config.batch, mesh, teacher.decoder, row_tokens=config.row_tokens)
    graph = teacher.graph(compute_dtype=model.compute_dtype, remat="none", layout=how.layout)
    return graph, teacher.params, teacher.frozen
