"""Runs vLLM: `LLM.generate` with n samples per prompt, and defaults otherwise.

`systems` follows vLLM's CPU guide: it preloads tcmalloc and Intel's OpenMP if they are installed, and sets as many OpenMP
threads as for the other systems. Prefix caching is on by default, and its blocks have 128 tokens on CPU.
"""

from typing import Any

from benchmarks.workload import Workload


class System:
    """A running engine. Options: vllm, a dict of additional arguments for `LLM`."""

    def __init__(self, workload: Workload) -> None:
        # Imported here, because the engine's subprocesses import this module's parent too.
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
        """Samples one round of responses at temperature 1, and returns them in the order of the prompts."""
        return self._generate(n=self.workload.samples, temperature=1.0, seed=None)

    def greedy(self) -> list[list[int]]:
        """Returns the greedy response to each prompt."""
        return self._generate(n=1, temperature=0.0)

    def _generate(self, **how: Any) -> list[list[int]]:
        prompts = [{"prompt_token_ids": ids} for ids in self.workload.prompt_ids()]
        # Every response has the full length. Text is not requested, because no other system generates text.
        wanted = [
            self.parameters(max_tokens=length, ignore_eos=True, detokenize=False, **how)
            for length in self.workload.lengths()[:: self.workload.samples]
        ]
        found = self.engine.generate(prompts, wanted, use_tqdm=False)
        return [list(response.token_ids) for prompt in found for response in prompt.outputs]
