"""Writes small GGUF files with the names, row order and metadata of llama.cpp's converter."""

import gguf
import numpy as np
from gguf import GGUFWriter

from dapo_jax.models.config_json import family_of
from dapo_jax.models.tensors import exported

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
END_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("1 2", "12 3", "Ġ t", "h e", "Ġt he", "' S")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_characters():
    """GPT-2's 256 characters for the bytes: printable Latin-1 characters are themselves, the others begin at U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


TOKENS = (
    *SPECIALS,
    *byte_characters(),
    *(merge.replace(" ", "") for merge in MERGES),
    "<think>",
    "[PAD266]",
    "[PAD267]",
)
TYPES = (3, 3, 3, *[1] * (256 + len(MERGES)), 4, 5, 5)


def interleaved(weight, heads):
    """Interleaves the rows i and i + dim / 2 of each head, index by index: the inverse of the reader."""
    dim = weight.shape[0] // heads
    rows = [
        head * dim + half * dim // 2 + i for head in range(heads) for i in range(dim // 2) for half in (0, 1)
    ]
    return weight[rows]


def write_gguf(path, config, params, *, pre="smollm", kinds=(), extra=None, tensors=None, types=TYPES):
    """`kinds` has the stored type by the end of a tensor's name; `extra` is additional or replaced metadata."""
    family = family_of(config)
    writer = GGUFWriter(str(path), family)
    metadata = {
        f"{family}.block_count": config.layers,
        f"{family}.context_length": config.max_positions,
        f"{family}.embedding_length": config.embed_dim,
        f"{family}.feed_forward_length": config.mlp_dim,
        f"{family}.attention.head_count": config.heads,
        f"{family}.attention.head_count_kv": config.kv_heads,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.attention.value_length": config.head_dim,
        f"{family}.rope.freq_base": float(config.rope_theta),
        f"{family}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
        **(extra or {}),
    }
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.add_array("tokenizer.ggml.tokens", list(TOKENS))
    writer.add_array("tokenizer.ggml.token_type", list(types))
    writer.add_array("tokenizer.ggml.merges", list(MERGES))
    for tensor in exported(config, params):
        _, _, rest = tensor.name.partition("model.layers.")
        layer, _, rest = rest.partition(".")
        name = f"blk.{layer}.{LAYER_NAMES[rest]}" if rest else END_NAMES[tensor.name]
        value = np.ascontiguousarray(tensor.fetch())
        if family == "llama" and rest in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            value = interleaved(value, config.heads if "q_proj" in rest else config.kv_heads)
        kind = next((kind for end, kind in dict(kinds).items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
