"""Runs TRL's GRPOTrainer with its own training loop, which is paused between optimizer steps.

To measure the update alone, generation and scoring are replaced by synthetic responses and advantages. The loop, the
loss, the backward pass and the optimizer remain the trainer's own.
"""

import queue
import threading
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.workload import Workload, reward_of


class _Trainer(GRPOTrainer):
    """Parses prompts as decimal token ids, so that all systems use the same ids."""

    made_up: dict[str, torch.Tensor] | None = None

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [[int(part) for part in text.split()] for text in prompts], None, {}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.made_up is None:
            return super()._generate_and_score_completions(inputs)
        return {name: value.to(self.accelerator.device) for name, value in self.made_up.items()}


class _Gate(TrainerCallback):
    """Lets the loop run one optimizer step at a time."""

    def __init__(self) -> None:
        self.wanted: queue.Queue[None] = queue.Queue()
        self.done: queue.Queue[BaseException | None] = queue.Queue()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.wanted.get()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done.put(None)


class System:
    """A running trainer. Options: rows_per_microbatch, gradient_checkpointing, gpu. On a GPU, weights are float32 even if the dtype is bfloat16."""

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(workload.threads)
        self.workload, rows = workload, workload.options.get("rows_per_microbatch", 16)
        self.version = f"trl {version('trl')}, torch {torch.__version__}"
        self.folder, self.gate = TemporaryDirectory(), _Gate()
        gpu = workload.options.get("gpu", False)
        dtype = torch.float32 if gpu else getattr(torch, workload.dtype)
        model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=dtype)
        self.trainer = _Trainer(
            model=model,
            reward_funcs=_rewards,
            processing_class=AutoTokenizer.from_pretrained(workload.model, padding_side="left"),
            train_dataset=_dataset(workload),
            callbacks=[self.gate],
            args=GRPOConfig(
                output_dir=self.folder.name,
                use_cpu=not gpu,
                bf16=gpu and workload.dtype == "bfloat16",
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=workload.sequences // rows,
                num_generations=workload.samples,
                max_completion_length=workload.new_tokens,
                generation_kwargs={"min_new_tokens": workload.new_tokens},
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                beta=0.0,
                num_iterations=1,
                epsilon=0.2,
                epsilon_high=0.28,
                loss_type="dapo",
                learning_rate=1e-6,
                weight_decay=0.1,
                max_grad_norm=1.0,
                gradient_checkpointing=workload.options.get("gradient_checkpointing", False),
                max_steps=1_000_000,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=workload.seed,
                shuffle_dataset=False,
                dataloader_num_workers=0,
            ),
        )
        self.first_weight = self._weight().clone()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def update(self) -> dict[str, float]:
        """Runs one optimizer step on synthetic responses."""
        self.trainer.made_up = _made_up(self.workload)
        return self._step()

    def step(self, seed: int) -> dict[str, float]:
        """Runs one pass of the trainer's own loop: generation, rewards and update."""
        torch.manual_seed(seed)
        self.trainer.made_up = None
        return self._step()

    def moved(self) -> float:
        """Returns the mean absolute change of the first layer's query weight since the start."""
        return (self._weight() - self.first_weight).abs().mean().item()

    def _weight(self) -> torch.Tensor:
        return self.trainer.model.model.layers[0].self_attn.q_proj.weight.detach()

    def _step(self) -> dict[str, float]:
        self.gate.wanted.put(None)
        if error := self.gate.done.get():
            raise error
        return {}

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:
            self.gate.done.put(error)


def _rewards(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward_of(ids) for ids in completion_ids]


def _dataset(workload: Workload) -> Dataset:
    texts = [" ".join(map(str, ids)) for ids in workload.prompt_ids()]
    return Dataset.from_dict({"prompt": texts * 64})


def _made_up(workload: Workload) -> dict[str, torch.Tensor]:
    """Returns synthetic responses in the format of the trainer's generation."""
    responses = workload.responses()
    rewards = torch.tensor([reward_of(row) for row in responses]).reshape(workload.prompts, -1)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    prompts = torch.tensor(workload.prompt_ids()).repeat_interleave(workload.samples, dim=0)
    completions = torch.tensor(responses)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": advantages.reshape(-1),
        "num_items_in_batch": torch.tensor(workload.tokens),
    }
