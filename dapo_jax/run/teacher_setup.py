"""Loads the teacher of a run, whose log-probabilities the updates use."""

from collections.abc import Callable
from dataclasses import replace

from jax.sharding import Mesh

from dapo_jax.config import ConfigError, ModelConfig, TrainConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.data.prompts import held_out
from dapo_jax.run.policy import Policy, load_policy
from dapo_jax.run.resume_point import model_files
from dapo_jax.run.training_pass import training_pass
from dapo_jax.text.formatting import PromptFormat
from dapo_jax.text.tokenizers import Tokenizer
from dapo_jax.training.update import Model


def teacher_of(config: TrainConfig) -> ModelConfig:
    """Returns the teacher's model: the `model` section with `teacher.source`."""
    return replace(config.model, source=config.teacher.source)


def teacher_prompt(config: TrainConfig, tokenizer: Tokenizer) -> Callable[[Prompt], Tokens]:
    """Returns the function from a prompt to the tokens of `teacher.prompt` for its row. The function raises ConfigError if the row lacks a column, or the tokens are too many."""
    data = config.data

    def encoded(prompt: Prompt) -> Tokens:
        asked = PromptFormat(data, config.teacher.prompt, prompt.row)
        with prefixed("teacher.prompt"):
            found = held_out([prompt.row], tokenizer, max_prompt_tokens=data.max_prompt_tokens, prompt_format=asked)  # fmt: skip
        return Tokens(found[0].tokens)

    return encoded


def load_teacher(config: TrainConfig, student: Policy, mesh: Mesh) -> Policy:
    """Loads the teacher of a run, sharded over `mesh`. Raises ConfigError if the teacher cannot be loaded, its tokenizer is not the tokenizer of the student,
    or it has fewer vocabulary entries."""
    model, longest = teacher_of(config), config.sequence_tokens
    teacher = load_policy(model, seed=config.seed, mesh=mesh, section="teacher", longest=longest)
    if student.tokenizer != teacher.tokenizer:
        of_student, of_teacher = (
            model_files(policy.folder, weights=False).get("tokenizer.json", "(no file)")
            for policy in (student, teacher)
        )
        raise ConfigError(
            f"teacher.source={config.teacher.source!r} has another tokenizer than model.source={config.model.source!r}: sha256 of tokenizer.json "
            f"{of_teacher} and {of_student}. Token ids must have the same meaning in both: use a teacher of the same model family"
        )
    needed, entries = student.decoder.vocab_size, teacher.decoder.vocab_size
    if entries < needed:
        raise ConfigError(
            f"teacher.source={config.teacher.source!r} has {entries} vocabulary entries, but the student may sample any of the {needed} entries of "
            f"model.source={config.model.source!r}: use a teacher with at least {needed} entries"
        )
    return teacher


def teacher_model(config: TrainConfig, teacher: Policy, mesh: Mesh) -> Model:
    """Returns the decoder of a teacher for updates on `mesh`, and its parameters."""
    decoder, row_tokens = teacher.decoder, config.row_tokens
    layout = training_pass(config.model, config.batch, mesh, decoder, row_tokens=row_tokens).layout
    graph = teacher.graph(compute_dtype=config.model.compute_dtype, remat="none", layout=layout)
    return graph, teacher.params, teacher.frozen
