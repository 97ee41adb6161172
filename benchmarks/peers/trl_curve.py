"""Trains one run with TRL for `benchmarks.curve`, in TRL's own environment: `python -m benchmarks.peers.trl_curve SETTINGS.json`."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig

from benchmarks.peers.trl import _Trainer
from benchmarks.workload import exact_reward


class _OwnDenominator(_Trainer):
    """Divides the loss of an update by this update's own tokens. TRL divides by the mean over the updates of a step."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        accumulated = self.current_gradient_accumulation_steps
        tokens = inputs["completion_mask"].sum() * self.args.steps_per_generation / accumulated
        return super().compute_loss(model, {**inputs, "num_items_in_batch": tokens}, *arguments, **named)


class _Saved(TrainerCallback):
    """Saves the weights at the evaluated steps, and records the seconds without the time for saving."""

    def __init__(self, settings: dict[str, Any], updates_per_step: int) -> None:
        self.settings, self.updates = settings, updates_per_step
        self.began, self.unmeasured = time.perf_counter(), 0.0
        self.steps: list[int] = []
        self.seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._save(model, 0)
        self.began, self.unmeasured = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        step, rest = divmod(state.global_step, self.updates)
        if not rest and step % self.settings["every_steps"] == 0:
            self._save(model, step)

    def _save(self, model: Any, step: int) -> None:
        now = time.perf_counter()
        self.steps.append(step)
        self.seconds.append(now - self.began - self.unmeasured if step else 0.0)
        folder = Path(self.settings["folder"]) / f"step_{step}"
        model.save_pretrained(folder)
        for file in Path(self.settings["model"]).glob("tokenizer*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        self.unmeasured += time.perf_counter() - now


def _tokenizer(settings: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the model's folder, with the given end token."""
    file = Path(settings["model"]) / "tokenizer.json"
    alphabet = json.loads(file.read_text()).get("alphabet")
    if alphabet is None:
        found = PreTrainedTokenizerFast(tokenizer_file=str(file), padding_side="left")
        found.pad_token, found.eos_token = found.convert_ids_to_tokens([0, settings["end"]])
        return found
    # The shipped models' tokenizer: ids 0 and 1 are padding and end, and each character has one id from 2 on.
    ids = {name: token for token, name in enumerate(["<pad>", "<end>", *alphabet])}
    made = Tokenizer(WordLevel(ids, unk_token="<pad>"))
    made.decoder = Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def main() -> None:
    """Trains with the settings of a JSON file."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    # Our updates use whole groups, in the order of the prompts.
    trl.trainer.grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer = _tokenizer(settings)
    rows, prompts = settings["groups_per_update"] * settings["group_size"], settings["prompts_per_step"]
    updates = prompts // settings["groups_per_update"]

    def rewards(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        limits = {
            "limit": settings["max_response_tokens"],
            "buffer": settings["buffer_tokens"],
            "marker": settings["answer_marker"],
        }
        lengths = map(len, completion_ids)
        return [
            exact_reward(text, true, tokens=tokens, **limits)
            for text, true, tokens in zip(completions, answer, lengths, strict=True)
        ]

    saved = _Saved(settings, updates)
    beta1, beta2, epsilon = settings["adam"]
    low, high = settings["clip"]
    trainer = _OwnDenominator(
        model=model,
        reward_funcs=rewards,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict(
            {
                "prompt": [" ".join(map(str, ids)) for ids in settings["prompt_ids"]],
                "answer": settings["answers"],
            }
        ),
        callbacks=[saved],
        args=GRPOConfig(
            output_dir=settings["folder"] + "/trl",
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            steps_per_generation=updates,
            num_generations=settings["group_size"],
            max_completion_length=settings["max_response_tokens"],
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            num_iterations=1,
            epsilon=low,
            epsilon_high=high,
            loss_type="dapo",
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant",
            warmup_steps=0,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            weight_decay=0.0,
            max_grad_norm=settings["max_grad_norm"],
            gradient_checkpointing=False,
            max_steps=settings["steps"] * updates,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=settings["seed"],
            shuffle_dataset=False,
            dataloader_num_workers=0,
        ),
    )
    trainer.train()
    times = {"steps": saved.steps, "seconds": saved.seconds}
    (Path(settings["folder"]) / "seconds.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
