"""Makes the golden models: tiny random ones of each family, with what transformers computes from them.

Run by hand, in an environment with torch and transformers (last: torch 2.13.0, transformers 5.23.0, on a CPU):

    python tests/golden/make_golden.py

Each folder beside this file then holds config.json and model.safetensors as transformers writes them (weights in
bfloat16, so that both sides start from the same numbers), and expected.safetensors: `tokens`, `logits` (float32, of
every position of `tokens`), and `greedy`, the 64 tokens that follow by full recomputation.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

HERE = Path(__file__).parent
VOCAB, PROMPT, RESPONSE = 48, 24, 64
MIN_GAP = 0.02
"""Between the best and the second logit of each greedy token: 100 times the tolerance of the tests, 2e-4."""

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
THETA = 100.0
"""So that 4 pairs of dimensions turn 5.1, 1.6, 0.5 and 0.2 times in 32 positions: each branch of each scaling is taken."""


def rope(**scaling):
    return {"rope_parameters": {"rope_theta": THETA, **({"rope_type": "default"} | scaling)}}


LLAMA3 = rope(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
CASES = {
    "llama": ("Llama", {**rope(), "tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "llama3_scaling": ("Llama", {**LLAMA3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama_linear": ("Llama", {**rope(rope_type="linear", factor=4.0), "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {**rope(), "tie_word_embeddings": True}),
    "qwen2_yarn": (
        "Qwen2",
        {
            **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": ("Qwen3", {**rope(), "tie_word_embeddings": False, "head_dim": 16}),
}


def random_model(family, settings, seed):
    """A model in which nothing is at its start value: norms differ from 1 and biases from 0."""
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=random)
            if "norm" in name:
                value = 1.0 + 0.3 * noise
            elif name.endswith("bias"):
                value = 0.5 * noise
            elif "embed" in name or "lm_head" in name:
                value = noise
            else:
                value = noise * 2.0 * weight.shape[1] ** -0.5
            weight.copy_(value.bfloat16().float())
    return model


def greedy(model, tokens):
    """The tokens that follow, and the smallest gap between best and second along the way."""
    row, gap = list(tokens), np.inf
    for _ in range(RESPONSE):
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0, -1]
        second, best = np.sort(logits.numpy())[-2:]
        gap = min(gap, best - second)
        row.append(int(logits.argmax()))
    return row[len(tokens) :], gap


def first_clear(name, model_of):
    """Returns the first model of `model_of(seed)` whose greedy tokens are clear, and the results expected of it."""
    for seed in range(1000):
        model = model_of(seed)
        tokens = np.random.default_rng(seed).integers(2, VOCAB, PROMPT)
        response, gap = greedy(model, tokens.tolist())
        # No 0 or 1, which pad and end a text; and no short cycle, which a wrong model could fall into as well.
        if gap >= MIN_GAP and min(response) >= 2 and len(set(response[-32:])) > 8:
            break
    assert gap >= MIN_GAP, f"{name}: the best and the second token are {gap} apart in every model tried"
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    print(f"{name}: seed {seed}, logits up to {abs(logits).max():.1f}, smallest gap {gap:.3f}")
    tokens, response = tokens.astype(np.int32), np.array(response, np.int32)
    return model, {"tokens": tokens, "greedy": response, "logits": logits}


def make(name):
    model, expected = first_clear(name, lambda seed: random_model(*CASES[name], seed))
    folder = HERE / name
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    for name in CASES:
        make(name)
