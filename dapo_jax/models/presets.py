"""Configurations of known decoders. Model families differ only in field values, so they do not have separate classes."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from typing import Any

import numpy as np

from dapo_jax.hints import nearest
from dapo_jax.models import gemma4
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention_mixer import ATTENTION, Attention
from dapo_jax.models.experts import Experts
from dapo_jax.models.gated import GATED, Gated
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.latent_attention import LatentAttention
from dapo_jax.models.layer_kinds import Fixed, LayerKind, Mixer, Mlp, Paged
from dapo_jax.models.mamba import Mamba
from dapo_jax.models.parameters import output_dimensions
from dapo_jax.models.rope import Rope, RopeScaling

GROUPS: dict[str, tuple[str, ...]] = {
    kind.group: kind.targets for kind in (Attention, Gated, GatedDelta, LatentAttention)
}
"""The matrices of each kind that may have adapters, by the name of the group in `lora.targets`. The first two kinds are the default in every layer."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Architecture):
    """Sizes and architecture options of a decoder, and the kinds of its layers."""

    mixers: tuple[Mixer | None, ...] = (ATTENTION,)
    """The mixer of each layer. If there are fewer mixers than layers, they repeat."""
    mlps: tuple[Mlp | None, ...] = (GATED,)
    """The MLP of each layer, likewise."""

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        for name in ("mixers", "mlps"):
            given = getattr(self, name)
            object.__setattr__(self, name, tuple(islice(cycle(given), self.layers)))
        if (alone := LayerKind(None, None)) in self.kinds:
            raise ValueError(f"layer {self.kinds.index(alone)} has neither a mixer nor an MLP")
        experts = [mlp.experts for mlp in self.mlps if mlp and mlp.experts]
        if len({(each.count, each.chosen) for each in experts}) > 1:
            raise ValueError(
                "all layers with experts must have the same number of experts and choose the same number for a token"
            )
        if not self.read:
            raise ValueError(f"a decoder must have at least one layer with attention, found {self.mixers}")
        if self.lora is not None:
            self._check_adapted(self.lora.targets)
        for rope in self.ropes:
            if rope is not None and (odd := rope.width(self.head_dim)) % 2:
                raise ValueError(
                    f"head_dim={self.head_dim} x partial_rotary_factor={rope.share:g} = {odd} must be even, because RoPE rotates pairs"
                )

    def _check_adapted(self, targets: Sequence[str]) -> None:
        known = {each.target for kind in self.stacks.values() for each in kind.parameters(self).values()}
        if lost := sorted(set(targets) - known):
            groups = [group for group, names in GROUPS.items() if known.issuperset(names)]
            raise ValueError(
                f"lora.targets has {', '.join(lost)}, but no layer of this model supports adapters of these matrices: set lora.targets=[{','.join(groups)}], "
                "or train all weights with lora.rank=0"
            )

    def for_length(self, tokens: int) -> "DecoderConfig":
        """Chooses the factors of longrope for a run whose longest sequence has `tokens` tokens. Other decoders do not change."""

        def chosen(rope: Rope | None) -> Rope | None:
            if rope is None or rope.scaling is None or rope.scaling.kind != "longrope":
                return rope
            long = tokens > rope.scaling.original_max_positions
            return replace(rope, scaling=replace(rope.scaling, long=long))

        return replace(self, ropes=tuple(map(chosen, self.ropes)))

    @property
    def length_note(self) -> str:
        """A sentence about the factors of longrope that `for_length` chose, or an empty string."""
        for rope in self.ropes:
            if rope is not None and rope.scaling is not None and rope.scaling.kind == "longrope":
                chosen, limit = ("long", "above") if rope.scaling.long else ("short", "at most")
                return (
                    f"RoPE uses {chosen}_factor, because data.max_prompt_tokens + sampling.max_response_tokens is {limit} "
                    f"original_max_position_embeddings={rope.scaling.original_max_positions}; a run on the other side of this limit has another policy"
                )
        return ""

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(map(LayerKind, self.mixers, self.mlps))

    @cached_property
    def periods(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """The segments into which the order of the layers is divided, so that few different layers are compiled: the stacks of the layers in one period, and the
        number of periods. A stack has the layers of one kind in one segment."""
        # Layers that read different sources are not repeated. So a source is in an earlier segment than the layers that read it.
        sources = [source if source != layer else None for layer, source in enumerate(self.sources)]
        layers, divided, found, used = list(zip(self.kinds, sources, strict=True)), [], [], Counter[str]()
        left: Sequence[Any] = layers
        while left:
            divided.append(_longest_repetition(left))
            left = left[len(divided[-1][0]) * divided[-1][1] :]
        if set(sources) == {None} and all(len(set(period)) == 1 for period, _ in divided):
            divided = [(layers, 1)]  # no period has layers of several kinds
        for period, count in divided:
            names = dict[LayerKind, str]()
            for kind, _ in period:
                if kind not in names:
                    used[kind.stack] += 1
                    names[kind] = kind.stack if used[kind.stack] == 1 else f"{kind.stack}_{used[kind.stack]}"
            found.append((tuple(names[kind] for kind, _ in period), count))
        return tuple(found)

    @cached_property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The place of each layer's parameters: the name of a stack (see `periods`), and an index."""
        names = [name for period, count in self.periods for name in period * count]
        return tuple((name, names[:layer].count(name)) for layer, name in enumerate(names))

    @cached_property
    def stacks(self) -> dict[str, LayerKind]:
        """The kind of the layers in each stack, in the order of the stacks' names. Initial values and programs have this order, too."""
        of_stack = {name: kind for (name, _), kind in zip(self.places, self.kinds, strict=True)}
        return {name: of_stack[name] for name in sorted(of_stack)}

    def layers_of(self, stack: str) -> list[int]:
        """Returns the layers in a stack (see `places`)."""
        return [layer for layer, (name, _) in enumerate(self.places) if name == stack]

    @cached_property
    def experts(self) -> Experts | None:
        """The experts of a layer that has experts, or None if no layer has experts."""
        return next((mlp.experts for mlp in self.mlps if mlp and mlp.experts), None)

    @cached_property
    def routed(self) -> tuple[int, ...]:
        """The layers with experts."""
        return tuple(layer for layer, mlp in enumerate(self.mlps) if mlp and mlp.experts)

    @property
    def routes(self) -> tuple[tuple[int, int], str] | None:
        """The shape of a token's record of experts, [layers with experts, chosen], and its dtype, or None if there are no experts."""
        if self.experts is None:
            return None
        wide = self.experts.count > np.iinfo(np.uint8).max
        return (len(self.routed), self.experts.chosen), "uint16" if wide else "uint8"

    def data(self, layer: int) -> dict[str, int]:
        """Returns the numbers of one layer (see `Mixer.data`)."""
        mixer = self.kinds[layer].mixer
        return {name: values[layer] for name, values in mixer.data(self).items()} if mixer else {}

    @cached_property
    def states(self) -> tuple[Paged | Fixed | None, ...]:
        """The form of the state of each layer."""
        mixers = enumerate(kind.mixer for kind in self.kinds)
        return tuple(None if mixer is None else mixer.state(self, layer) for layer, mixer in mixers)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it reads: itself, or an earlier layer (see `Mixer.source`)."""

        def source(layer: int) -> int:
            if (mixer := self.mixers[layer]) is None or (wanted := mixer.source) is None:
                return layer
            if wanted not in self.mixers[:layer]:
                raise ValueError(
                    f"layer {layer} reads the keys of an earlier layer, but no layer before it has the mixer {wanted}"
                )
            return max(at for at in range(layer) if self.mixers[at] == wanted)

        return tuple(map(source, range(self.layers)))

    def layers_with(self, kind: type) -> list[int]:
        """Returns the layers that have a state of this kind, `Paged` or `Fixed`."""
        return [layer for layer, state in enumerate(self.states) if isinstance(state, kind)]

    @property
    def paged(self) -> tuple[Paged, ...]:
        """The states in pages, in the order of the layers."""
        return tuple(state for state in self.states if isinstance(state, Paged))

    @property
    def read(self) -> tuple[Paged, ...]:
        """The state in pages that each layer with attention reads. Several layers may read one state."""
        return tuple(state for at in self.sources if isinstance(state := self.states[at], Paged))

    @property
    def fixed(self) -> tuple[Fixed, ...]:
        """The states of fixed size, in the order of the layers."""
        return tuple(state for state in self.states if isinstance(state, Fixed))

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the states of fixed size of one sequence, in all layers."""
        return sum(state.bytes for state in self.fixed)

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding and the unembedding. Rows beyond `vocab_size` are padding: no token uses them."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def of_all_layers(self, size: Callable[[LayerKind], Any]) -> Any:
        """Returns the sum of `size` over all layers."""
        return sum(len(self.layers_of(stack)) * size(kind) for stack, kind in self.stacks.items())

    @property
    def parameters(self) -> int:
        """Number of parameters, excluding adapters and vocabulary padding."""
        ends = (self.vocab_size * (1 if self.tied_embeddings else 2) + 1) * self.embed_dim
        ends += self.layer_embed_dim * (self.layers * (self.vocab_size + self.embed_dim) + 1)
        return ends + self.of_all_layers(
            lambda kind: sum(each.size for each in kind.parameters(self).values())
        )

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses: all parameters except the experts that the router does not choose."""

        def idle(kind: LayerKind) -> int:
            of_experts = sum(each.size for each in kind.parameters(self).values() if "experts" in each.axes)
            return round(of_experts * (1 - kind.mlp.used(1))) if kind.mlp else 0

        return self.parameters - self.of_all_layers(idle)

    @property
    def trained_parameters(self) -> int:
        """Number of trained parameters. If there are adapters, only they are trained."""
        if self.lora is None:
            return self.parameters
        targets = self.lora.targets

        def of_adapters(kind: LayerKind) -> int:
            adapted = [each for each in kind.parameters(self).values() if each.target in targets]
            sizes = [(each.shape, output_dimensions(each.axes).stop) for each in adapted]
            return sum(math.prod(shape[:outputs]) + math.prod(shape[outputs:]) for shape, outputs in sizes)

        return self.lora.rank * self.of_all_layers(of_adapters)

    @property
    def size_note(self) -> str:
        """The number of parameters in words. With experts, it includes the number of parameters that each token uses."""
        active = f" ({self.active_parameters:,} used per token)" if self.experts else ""
        return f"{self.parameters:,} parameters{active}"

    @property
    def base(self) -> "DecoderConfig":
        """The configuration of the same decoder without adapters."""
        return replace(self, lora=None)


def _longest_repetition(values: Sequence[Any]) -> tuple[Sequence[Any], int]:
    """Returns the period at the start of `values` that covers the most values, and how often it occurs there. Without a repetition, the period is the first value."""
    best = 1, 1
    for length in range(1, len(values) // 2 + 1):
        count = 1
        while values[count * length : (count + 1) * length] == values[:length]:
            count += 1
        if count > 1 and length * count > best[0] * best[1]:
            best = length, count
    return values[: best[0]], best[1]


def _sized(
    base: DecoderConfig, embed_dim: int, layers: int, heads: int, mlp_dim: int, **others: Any
) -> DecoderConfig:
    return replace(base, embed_dim=embed_dim, layers=layers, heads=heads, mlp_dim=mlp_dim, **others)


def _llama3_rope(factor: float) -> Rope:
    return Rope(theta=5e5, scaling=RopeScaling(kind="llama3", factor=factor, original_max_positions=8192))


_LLAMA3 = DecoderConfig(
    vocab_size=128_256, embed_dim=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp_dim=8192, norm_eps=1e-5,
    max_positions=131_072, ropes=(_llama3_rope(32.0),),
)  # fmt: skip
_QWEN2_5 = DecoderConfig(
    family="qwen2", vocab_size=151_936, embed_dim=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp_dim=4864, ropes=(Rope(theta=1e6),),
    max_positions=32_768, qkv_bias=True,
)  # fmt: skip
_QWEN2_5_LARGE = replace(
    _QWEN2_5, vocab_size=152_064, heads=28, kv_heads=4, head_dim=128, tied_embeddings=False
)
_QWEN3 = DecoderConfig(
    family="qwen3", vocab_size=151_936, embed_dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_dim=3072, ropes=(Rope(theta=1e6),),
    max_positions=40_960, qk_norm="head",
)  # fmt: skip


_QWEN3_5 = DecoderConfig(
    family="qwen3_5_text", vocab_size=248_320, embed_dim=1024, layers=24, heads=8, kv_heads=2, head_dim=256, mlp_dim=3584, ropes=(Rope(theta=1e7, share=0.25),),
    max_positions=262_144, qk_norm="head", norm_offset=1.0, attention_gate=True, mixers=(*[GatedDelta(16, 16, 128, 128)] * 3, ATTENTION),
)  # fmt: skip

# The sizes are from config.json in the publishers' repositories: HuggingFaceTB/SmolLM2-135M, meta-llama/Llama-3.2-1B,
# Qwen/Qwen2.5-*, Qwen/Qwen3-*, Qwen/Qwen3.5-*, openai/gpt-oss-20b, google/gemma-3-1b-it, google/gemma-4-E4B-it. Tests check the number of parameters of each preset.
_GEMMA4: dict[str, Any] = {
    "family": "gemma4_text", "vocab_size": 262_144, "embed_dim": 2560, "layers": 42, "heads": 8, "kv_heads": 2, "head_dim": 256, "mlp_dim": 10_240,
    "max_positions": 131_072, "norm_place": "both", "qk_norm": "head", "query_scale": 1.0, "activation": "gelu_tanh", "logit_cap": 30.0,
    "ropes": (Rope(theta=1e6, share=0.25, proportional=True), Rope()), "rope_of_layer": (1, 1, 1, 1, 1, 0) * 7, "windows": (512, 512, 512, 512, 512, 0) * 7,
}  # fmt: skip

PRESETS: dict[str, DecoderConfig] = {
    # About half a million parameters and a character vocabulary. It can be trained to do arithmetic on a laptop CPU.
    "tiny": DecoderConfig(
        vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=256, max_positions=512
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49152, embed_dim=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_dim=1536,
        ropes=(Rope(theta=1e5),), norm_eps=1e-5, max_positions=8192,
    ),
    "llama-3.2-1b": _LLAMA3,
    "llama-3.1-8b": _sized(
        _LLAMA3, 4096, 32, 32, 14_336, head_dim=128, tied_embeddings=False,
        ropes=(_llama3_rope(8.0),),
    ),
    "qwen2.5-0.5b": _QWEN2_5,
    "qwen2.5-1.5b": _sized(_QWEN2_5, 1536, 28, 12, 8960, head_dim=128),
    "qwen2.5-3b": _sized(_QWEN2_5, 2048, 36, 16, 11_008, head_dim=128),
    "qwen2.5-7b": _sized(_QWEN2_5_LARGE, 3584, 28, 28, 18_944),
    "qwen2.5-32b": _sized(_QWEN2_5_LARGE, 5120, 64, 40, 27_648, kv_heads=8),
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": _sized(_QWEN3, 2048, 28, 16, 6144),
    "qwen3-4b": _sized(_QWEN3, 2560, 36, 32, 9728),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 12_288, tied_embeddings=False),
    # As small as `tiny`, for trying out mixtures of experts.
    "tiny-moe": DecoderConfig(
        family="qwen3_moe", vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=64, max_positions=512,
        qk_norm="head", mlps=(Experts(8, 2, normalize=True),),
    ),
    "qwen3-30b-a3b": _sized(
        _QWEN3, 2048, 48, 32, 768, family="qwen3_moe", kv_heads=4, tied_embeddings=False, mlps=(Experts(128, 8, normalize=True),),
    ),
    # As small as `tiny`, for trying out Gated DeltaNet layers.
    "tiny-qwen3.5": replace(
        _QWEN3_5, vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=256, max_positions=512,
        ropes=(Rope(share=0.25),), mixers=(*[GatedDelta(2, 4, 32, 32)] * 3, ATTENTION),
    ),
    "qwen3.5-0.8b": _QWEN3_5,
    "tiny-qwen3.5-moe": replace(
        _QWEN3_5, family="qwen3_5_moe_text", vocab_size=32, embed_dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=64, max_positions=512,
        ropes=(Rope(share=0.25),), mixers=(*[GatedDelta(2, 4, 32, 32)] * 3, ATTENTION), mlps=(Experts(8, 2, normalize=True, shared_dim=64, shared_gate=True),),
    ),
    # As small, with Mamba-2, attention or experts in each layer.
    "tiny-nemotron-h": DecoderConfig(
        family="nemotron_h", vocab_size=32, embed_dim=128, layers=6, heads=4, kv_heads=2, head_dim=32, mlp_dim=128, max_positions=512, ropes=(None,),
        mlp_gate=False, activation="relu2", mixers=(Mamba(8, 32, 2, 32), None, Mamba(8, 32, 2, 32), None, ATTENTION, None),
        mlps=(None, Experts(8, 2, normalize=True, shared_dim=128, sigmoid=True, choice_bias=True)),
    ),
    "qwen3.5-35b-a3b": _sized(
        _QWEN3_5, 2048, 40, 16, 512, family="qwen3_5_moe_text", tied_embeddings=False, mixers=(*[GatedDelta(16, 32, 128, 128)] * 3, ATTENTION),
        mlps=(Experts(256, 8, normalize=True, shared_dim=512, shared_gate=True),),
    ),
    "gpt-oss-20b": DecoderConfig(
        family="gpt_oss", vocab_size=201_088, embed_dim=2880, layers=24, heads=64, kv_heads=8, head_dim=64, mlp_dim=2880, norm_eps=1e-5, max_positions=131_072,
        tied_embeddings=False, qkv_bias=True, output_bias=True, sinks=True, windows=(128, 0) * 12, gate_limit=7.0, gate_alpha=1.702,
        ropes=(Rope(theta=1.5e5, scaling=RopeScaling(kind="yarn", factor=32.0, original_max_positions=4096, truncate=False)),),
        mlps=(Experts(32, 4, normalize=True, biases=True),),
    ),
    "gemma-3-1b": DecoderConfig(
        family="gemma3_text", vocab_size=262_144, embed_dim=1152, layers=26, heads=4, kv_heads=1, head_dim=256, mlp_dim=6912, max_positions=32_768,
        norm_place="both", norm_offset=1.0, qk_norm="head", activation="gelu_tanh", embed_scale=1152**0.5, query_scale=256**-0.5,
        windows=tuple(0 if layer % 6 == 5 else 512 for layer in range(26)), ropes=(Rope(theta=1e6), Rope()),
        rope_of_layer=tuple(int(layer % 6 != 5) for layer in range(26)),
    ),
    "gemma-4-e4b": DecoderConfig(**_GEMMA4 | gemma4.read(gemma4.DEFAULTS | {"num_kv_shared_layers": 18}, _GEMMA4, "gemma-4-e4b")),
}  # fmt: skip


def preset(name: str) -> DecoderConfig:
    """Returns the preset with the name `name`. Raises ValueError if there is no such preset. The message suggests the most similar name."""
    if name not in PRESETS:
        near = nearest(name, PRESETS, least=0.0)[0]
        raise ValueError(f"no model preset {name!r}; the nearest is {near!r} (all: {', '.join(PRESETS)})")
    return PRESETS[name]
