"""The sections `model`, `lora` and `sampling`."""

from dataclasses import dataclass

from dapo_jax.config.keys import POSITIVE, SIZE, Range, key
from dapo_jax.config.model_source import SourceParts, source_parts
from dapo_jax.config.section import Section
from dapo_jax.hints import nearest

DTYPES = ("float32", "bfloat16")
TEMPERATURE = Range("0 (greedy), or 0.001 to 1000", lambda v: v == 0 or 1e-3 <= v <= 1e3)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, at="model"):
    """The model: its source, tokenizer, dtype, attention implementation and gradient checkpointing."""

    source: str = key("preset:tiny", not_empty=True, aliases="model_name_or_path model.path model_revision")
    """The model: `preset:NAME` (random weights), `shipped:NAME` (included in the package), `hf:ORG/NAME` or `hf:ORG/NAME@COMMIT` (from the Hugging Face Hub), or a model folder.
    COMMIT may also be a branch or a tag. A commit makes a run reproducible.
    A model folder contains config.json, tokenizer.json and model.safetensors. It is a local folder, or `gs://BUCKET/FOLDER` (needs the `gcs` extra). The folder of a run of `train` or `sft`
    is possible too. The run then starts with that run's weights and tokenizer, at step 0 and with a new optimizer state. `RUN` loads the latest checkpoint of a training run. `RUN@best` loads
    the saved checkpoint with the highest evaluation score (see `checkpoint.keep_best`)."""
    tokenizer: str = "byte"
    """Tokenizer for a preset: `byte`, or `char:ALPHABET`, which has one token per character of ALPHABET. All other models come with their own tokenizer."""
    compute_dtype: str = key("float32", choices=DTYPES, aliases="dtype torch_dtype bf16 fp16")
    """Dtype of activations and matrix products: float32 or bfloat16. Master weights are always float32."""
    attention: str = key("auto", choices=["auto", "xla", "splash", "cudnn"], may_change=True)
    """Attention implementation for training. xla runs on every platform. splash is a TPU kernel. With splash, packed responses cannot share the computation of their
    prompt. cudnn is an NVIDIA GPU kernel for bfloat16. auto selects splash on a TPU, cudnn on a GPU of compute capability 9.0 or higher in bfloat16 without parallel.context (if the
    model does not cap attention scores), and xla otherwise."""
    remat: str = key(
        "none",
        choices=["none", "full", "dots"],
        aliases="gradient_checkpointing enable_gradient_checkpointing",
        may_change=True,
    )
    """Gradient checkpointing: the backward pass recomputes activations instead of storing them. none recomputes nothing. full recomputes all activations. dots recomputes all activations except the results of matrix products."""

    @property
    def parts(self) -> SourceParts:
        """The parts of `source`."""
        return source_parts(self.source)


LORA_TARGETS = (
    "all", "attention", "mlp", "linear_attention", "latent_attention", *(f"{p}_proj" for p in ["q", "k", "v", "o", "gate", "up", "down"]),
    "in_proj_z", "out_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
)  # fmt: skip
"""Allowed values in `lora.targets`: the names of linear layers in transformers and PEFT, and names for groups of these layers."""
_OTHER_TARGETS = {
    "all-linear": "all",
    "qkv_proj": "q_proj, k_proj and v_proj",
    "gate_up_proj": "gate_proj and up_proj",
}
"""The values for names of PEFT and of layers that are joined in some models."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section, at="lora"):
    """Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): only small added matrices are trained, and the model's own weights are frozen."""

    rank: int = key(0, aliases="lora_rank lora_r peft_config use_peft")
    """Rank of each adapter. 0 means that there are no adapters and all weights are trained. With adapters, the model's own weights are frozen and stored in `model.compute_dtype`. Only the adapters are
    saved, and their size is about rank / width of the model's size. The reference policy for a KL penalty is then the model without adapters."""
    alpha: float = key(32.0, range=POSITIVE, aliases="lora_alpha")
    """Scale of the adapters: their output is multiplied by alpha / rank. Because of this scaling, one learning rate suits every rank: about ten times the learning rate for full training."""
    targets: list[str] = key(default_factory=lambda: ["all"], aliases="target_modules lora_target_modules")
    """Linear layers that get an adapter: all, attention, mlp, or single layers by their transformers names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj or down_proj.
    Models with Gated DeltaNet also have linear_attention (in_proj_z and out_proj), and models with latent attention have latent_attention (q_a_proj, q_b_proj,
    kv_a_proj_with_mqa, kv_b_proj and o_proj), which all does not include."""

    def check_together(self) -> None:
        if unknown := [name for name in self.targets if name not in LORA_TARGETS]:
            name = str(unknown[0])
            near = [_OTHER_TARGETS[name]] if name in _OTHER_TARGETS else nearest(name, LORA_TARGETS)
            remedy = f"write {near[0]} instead of {name}" if near else f"remove {name}"
            self.refuse("targets", f"a list of {', '.join(LORA_TARGETS)}", remedy)
        if not self.targets:
            self.refuse("targets", "one linear layer or more", "write [all], or leave it out")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section, at="sampling"):
    """Sampling of responses."""

    temperature: float = key(1.0, range=TEMPERATURE)
    """Softmax temperature for sampling, and for log-probabilities in training. (Section 4.1)"""
    max_response_tokens: int = key(
        20480, range=SIZE, aliases="max_completion_length max_response_length max_new_tokens response_length"
    )
    """Maximum number of tokens per response. The default is the expected maximum length plus the soft overlong buffer. (Section 4.1)"""
    slots: int = key(256, range=SIZE, aliases="max_num_seqs", may_change=True)
    """Number of responses that each sampler decodes in parallel. There is one sampler per `parallel.sampler_hosts` processes."""
    prefill_tokens: int = key(
        4096, range=SIZE, aliases="max_num_batched_tokens chunked_prefill_size", may_change=True
    )
    """Maximum number of prompt tokens per prefill. Longer prompts are prefilled in chunks."""
    cache_tokens: int = key(0, aliases="vllm_gpu_memory_utilization gpu_memory_utilization", may_change=True)
    """Capacity of a sampler's KV cache in tokens, over all of the sampler's devices. If the cache is full, the most recently started response is preempted and later
    re-prefilled. Layers with a window keep fewer tokens. 0 means as many tokens as fit into device memory next to the weights and the training state. A run logs this number when it
    starts. On CPU, 0 means enough tokens for all slots."""
    cache_dtype: str = key(
        "", choices=["", "int8", "float8_e4m3fn"], aliases="kv_cache_dtype", may_change=True
    )
    """Dtype of cached keys and values. Defaults to model.compute_dtype. The 8-bit types use one scale per token and head. Compared with bfloat16, the cache stores twice as many
    tokens and is read twice as fast. The sampler's log-probabilities then differ more from the trainer's, so training needs loss.importance_range=[0,2], another loss.correction, or loss.old_logprobs=sampler."""
    weight_dtype: str = key("", choices=["", "int8"], aliases="quantization", may_change=True)
    """Dtype of the sampler's weight matrices. Defaults to model.compute_dtype. int8 uses one scale per output feature. Training then needs the same correction as with cache_dtype."""
    batch_invariant: bool = key(False, may_change=True)
    """Make log-probabilities bitwise independent of the other responses in the batch, of `sampling.slots` and of the number of processes. Each device then decodes eight
    slots at a time and prefills each prompt separately, which is slower. If false, log-probabilities depend on these three, but only by rounding."""
    stop: list[str] = key(default_factory=list, aliases="stop_strings")
    """Strings that end a response, in training and in evaluation. The response keeps the tokens of the stop string, but graders receive only the text before it."""
    stop_token_ids: list[int] = key(default_factory=list)
    """Token ids that end a response, in addition to the tokenizer's end tokens."""

    @property
    def steps_per_call(self) -> int:
        """Number of decoding steps per device call. Between calls, the host replaces finished responses with new ones, so there are fewer steps for short responses."""
        most = 8 if self.max_response_tokens <= 256 else 16
        return max(1, min(self.max_response_tokens // 2, most))

    def check_together(self) -> None:
        if "" in self.stop:
            remedy = "every text contains the empty string, so every response would end at once: remove it"
            self.refuse("stop", "non-empty strings", remedy)
