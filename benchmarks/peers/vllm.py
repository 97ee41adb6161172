"""vLLM: `LLM.generate` with n samples a prompt, everything else as it comes.

`systems` gives it what its CPU guide asks for: tcmalloc and Intel's OpenMP preloaded where they are there, and as many
OpenMP threads as the other systems have. Prefix caching is on, as it is by default; its blocks hold 128 tokens on CPU.
"""

from typing import Any

from benchmarks.workload import Workload


class System:
    """One engine, started once. Options: vllm, a dictionary of further arguments of `LLM`."""

    def __init__(self, workload: Workload) -> None:
        # Imported here: the engine's own processes import this module's parent again.
        import vllm

        self.workload, self.version = workload, f"vllm {vllm.__version__}"
        arguments = {
            "max_num_seqs": workload.sequences,
            "kv_cache_memory_bytes": 2 * 2**30,
            **workload.options.get("vllm", {}),
        }
        self.engine = vllm.LLM(
            workload.model,
            dtype=workload.dtype,
            max_model_len=workload.prompt_tokens + workload.new_tokens,
            **arguments,
        )
        self.parameters = vllm.SamplingParams

    def rollout(self, seed: int) -> list[list[int]]:
        """The responses of one round, at temperature 1, in the prompts' order."""
        return self._generate(n=self.workload.samples, temperature=1.0, seed=None)

    def greedy(self) -> list[list[int]]:
        """The greedy response to each prompt."""
        return self._generate(n=1, temperature=0.0)

    def _generate(self, **how: Any) -> list[list[int]]:
        prompts = [{"prompt_token_ids": ids} for ids in self.workload.prompt_ids()]
        # Every response has the full length; text is not asked for, since no other system makes any.
        wanted = self.parameters(
            max_tokens=self.workload.new_tokens, ignore_eos=True, detokenize=False, **how
        )
        found = self.engine.generate(prompts, wanted, use_tqdm=False)
        return [list(response.token_ids) for prompt in found for response in prompt.outputs]
