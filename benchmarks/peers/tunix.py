"""Runs Tunix: its own sampler, and its GRPO learner for the update and the whole step.

Tunix prefills one copy of the prompt for each response in a group. It accepts prompts only as text. Therefore a tokenizer
writes ids as decimal numbers, so that all systems use the same ids.
"""

import queue
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rollout import base_rollout

from benchmarks.workload import Workload, reward_of

NO_TOKEN = -1
"""An end token that is never sampled, so that every response reaches its length limit."""


class IdTokenizer:
    """A tokenizer whose texts are token ids as decimal numbers."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # if it is 0, the sampler adds no BOS token

    def eos_id(self) -> int:
        return 0

    def pad_id(self) -> int:
        return 0


class System:
    """A loaded model. Options: for_training, prompts_per_microbatch."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.version = (
            workload,
            f"google-tunix {version('google-tunix')}, jax {jax.__version__}",
        )
        self.mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        self.config = _config(workload)
        # Tunix 0.1.7 ignores the configured rope_theta: its Llama uses the default of 1e6, which changes the output.
        llama.apply_rope.__defaults__ = (self.config.rope_theta,)
        with self.mesh:
            self.model = create_model_from_safe_tensors(
                workload.model, self.config, self.mesh, dtype=jnp.dtype(workload.dtype)
            )
        self.texts = [IdTokenizer().decode(ids) for ids in workload.prompt_ids()]
        self.capacity = workload.prompt_tokens + workload.new_tokens
        if workload.options.get("for_training"):
            self._learner()
        else:
            shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
            self.sampler = Sampler(self.model, IdTokenizer(), CacheConfig(self.capacity, *shape))

    def rollout(self, seed: int) -> list[list[int]]:
        """Samples one round of responses at temperature 1, and returns them in the order of the prompts."""
        copies = [text for text in self.texts for _ in range(self.workload.samples)]
        return self._generate(copies, temperature=1.0, top_p=1.0, seed=seed)

    def greedy(self) -> list[list[int]]:
        """Returns the greedy response to each prompt."""
        return self._generate(self.texts, temperature=0.0)

    def _generate(self, texts: list[str], **how: Any) -> list[list[int]]:
        with self.mesh:
            found = self.sampler(
                texts,
                max_generation_steps=self.workload.new_tokens,
                max_prompt_length=self.workload.prompt_tokens,
                eos_tokens=[NO_TOKEN],
                **how,
            )
        return [np.asarray(tokens).tolist() for tokens in found.tokens]

    def _learner(self) -> None:
        """Creates the GRPO learner, without a reference policy and with one update per batch of prompts."""
        workload = self.workload
        per_microbatch = workload.options.get("prompts_per_microbatch", 1)
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(1e-6, b1=0.9, b2=0.999, weight_decay=0.1)
        )
        roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
        training = rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer,
            eval_every_n_steps=1_000_000,
            max_steps=1_000_000,
            mini_batch_size=workload.prompts,
            train_micro_batch_size=per_microbatch,
            rollout_micro_batch_size=workload.prompts,
            compute_logps_micro_batch_size=workload.prompts,
        )
        rollout = base_rollout.RolloutConfig(
            max_tokens_to_generate=workload.new_tokens,
            max_prompt_length=workload.prompt_tokens,
            kv_cache_size=self.capacity,
            temperature=1.0,
            top_p=1.0,
            eos_tokens=[NO_TOKEN],
        )
        self.cluster = rl_cluster.RLCluster(
            actor=self.model,
            tokenizer=IdTokenizer(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, self.mesh),
                rollout_engine="vanilla",
                training_config=training,
                rollout_config=rollout,
            ),
        )
        del self.model
        self.learner = GRPOLearner(
            self.cluster, GRPOConfig(num_generations=workload.samples, num_iterations=1, beta=0.0), _rewards
        )
        self._first_weight = np.array(self._weight())
        self._wanted: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()
        self._training: threading.Thread | None = None

    def update(self) -> dict[str, float]:
        """Runs one update on synthetic responses, in the learner's microbatches."""
        workload = self.workload
        rows = workload.options.get("prompts_per_microbatch", 1) * workload.samples
        prompts = np.repeat(np.array(workload.prompt_ids(), np.int32), workload.samples, axis=0)
        responses = np.array(workload.responses(), np.int32)
        rewards = np.array([reward_of(row) for row in responses.tolist()]).reshape(workload.prompts, -1)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
        examples = [
            TrainExample(
                prompt_ids=jnp.asarray(prompts[part]),
                prompt_mask=jnp.ones_like(prompts[part], bool),
                completion_ids=jnp.asarray(responses[part]),
                completion_mask=jnp.ones_like(responses[part], bool),
                advantages=jnp.asarray(advantages.reshape(-1)[part], jnp.float32),
                ref_per_token_logps=None,
                old_per_token_logps=None,
            )
            for part in (slice(start, start + rows) for start in range(0, workload.sequences, rows))
        ]
        self.cluster.update_actor(examples, None)
        jax.block_until_ready(nnx.state(self.cluster.actor_trainer.model))
        return {}

    def moved(self) -> float:
        """Returns the mean absolute change of the first layer's query weight since the start."""
        return float(np.abs(np.array(self._weight()) - self._first_weight).mean())

    def _weight(self) -> jax.Array:
        return self.cluster.actor_trainer.model.layers[0].attn.q_proj.w[...]

    def step(self, seed: int) -> dict[str, float]:
        """Runs one pass of the learner's own loop. Between passes, the loop waits for its data."""
        del seed  # the learner generates its own random numbers
        if self._training is None:
            self._training = threading.Thread(target=self._train, daemon=True)
            self._training.start()
            self._done.get()  # waits until the loop requests its first batch
        self._wanted.put(None)
        if error := self._done.get():
            raise error
        jax.block_until_ready(nnx.state(self.cluster.actor_trainer.model))
        return {}

    def _train(self) -> None:
        def batches() -> Iterator[dict[str, list[str]]]:
            while True:
                # The loop returns here once the previous update is complete.
                self._done.put(None)
                self._wanted.get()
                yield {"prompts": np.array(self.texts)}

        try:
            self.learner.train(batches())
        except BaseException as error:
            self._done.put(error)


def _rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [reward_of([int(part) for part in text.split()]) for text in completions]


def _config(workload: Workload) -> llama.ModelConfig:
    """Returns Tunix's configuration for the model in the folder.

    Raises:
        ValueError: the model is not a Llama model. Tunix implements other families in other modules.
    """
    sizes = workload.sizes()
    if sizes["model_type"] != "llama":
        raise ValueError(
            f"the Tunix benchmark runs only Llama models; {workload.model} is {sizes['model_type']!r}"
        )
    rope = sizes.get("rope_parameters") or sizes
    return llama.ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        rope_theta=int(rope["rope_theta"]),
        norm_eps=sizes["rms_norm_eps"],
        weight_tying=sizes["tie_word_embeddings"],
    )
