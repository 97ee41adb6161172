"""Runs Hugging Face transformers: `generate` with `num_return_sequences`, as its documentation recommends."""

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.workload import Workload


class System:
    """A loaded model."""

    def __init__(self, workload: Workload) -> None:
        torch.set_num_threads(workload.threads)
        self.workload = workload
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        dtype = getattr(torch, workload.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=dtype).eval()
        # Without an end token, every response has the full length.
        self.model.generation_config.eos_token_id = None
        self.prompts = torch.tensor(workload.prompt_ids())

    def rollout(self, seed: int) -> list[list[int]]:
        """Samples one round of responses at temperature 1, and returns them in the order of the prompts."""
        torch.manual_seed(seed)
        drawn = self._generate(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=self.workload.samples
        )
        return drawn.tolist()

    def greedy(self) -> list[list[int]]:
        """Returns the greedy response to each prompt."""
        return self._generate(do_sample=False).tolist()

    @torch.inference_mode()
    def score(self, responses: list[list[int]]) -> float:
        """Returns the mean log-probability in nats of a round's tokens. `responses` must be in the order of the prompts."""
        start, total = self.workload.prompt_tokens, 0.0
        prompts = self.prompts.repeat_interleave(self.workload.samples, dim=0)
        rows = torch.cat([prompts, torch.tensor(responses)], dim=1)
        for part in rows.split(4):
            logits = self.model(part).logits[:, start - 1 : -1].float()
            chosen = logits.log_softmax(-1).gather(-1, part[:, start:, None])
            total += chosen.sum().item()
        return total / self.workload.tokens

    @torch.inference_mode()
    def _generate(self, **how: object) -> torch.Tensor:
        whole = self.model.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            max_new_tokens=self.workload.new_tokens,
            pad_token_id=0,
            **how,
        )
        return whole[:, self.prompts.shape[1] :]
