"""The checks in their order, what each needs, and the verdict on them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import jax

from dapo_jax.config import ModelConfig, TrainConfig
from dapo_jax.config.data_schema import DataConfig
from dapo_jax.doctor import machine
from dapo_jax.doctor.check import Check, Finding, Found, examine
from dapo_jax.doctor.prompts_and_graders import Asked
from dapo_jax.doctor.resources import Configured
from dapo_jax.doctor.tiny_step import TinyStep

OWN_MODEL = {"cpu": 10**9}
"""Platform -> parameters up to which the tiny step is made with the run's own model, without `full`."""
OWN_MODEL_ELSEWHERE = 10**10

SUMS = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
_ALPHABET = "0123456789+="

FIRST_PHASE = "weights"


def examination(
    config: TrainConfig | None = None,
    *,
    full: bool = False,
    quick: bool = False,
    right: str = "",
    before: Callable[[Check], object] = lambda check: None,
) -> list[Finding]:
    """Everything that can be found out here in about a minute.

    Args:
        config: of a run; None looks at the machine alone, with a tiny model.
        full: make the tiny step with the run's own model, however large.
        quick: leave the tiny step out.
        right: how a response that is right is written, with `{answer}` in it; empty tries several ways.
        before: called with each check that is about to be made.
    """
    with ExitStack() as stack:
        subject = _Subject(config, full, right, stack)
        step = [] if quick else subject.of_step()
        return examine([*subject.of_machine(), *subject.of_configuration(), *step], before=before)


def verdict(findings: Sequence[Finding], *, configured: bool) -> tuple[bool, str]:
    """Whether training can start, and that in a sentence."""
    what = "This configuration" if configured else "This machine"
    failed = [finding.name for finding in findings if finding.state == "failed"]
    if failed:
        return False, f"{what} cannot train here: see {_listed(failed)}."
    unsure = [finding.name for finding in findings if finding.state != "ok"]
    but = f", but see {_listed(unsure)}" if unsure else ""
    if FIRST_PHASE not in [finding.name for finding in findings]:
        return (
            True,
            f"Nothing was found that keeps {what.lower()} from training here{but}; no step was tried.",
        )
    return True, f"{what} can train here{but}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(frozen=True)
class _Subject:
    """The subject of an examination."""

    config: TrainConfig | None
    full: bool
    right: str
    stack: ExitStack

    @cached_property
    def named(self) -> Configured:
        """The resources that the configuration names; without one, the stand-in."""
        return Configured(self.config or _stand_in())

    @cached_property
    def asked(self) -> Asked:
        """The configuration's prompts and graders."""
        rows = SUMS if self.config is None else None
        return Asked(self.named.config, self.named.tokenizer, rows=rows, form=self.right)

    @cached_property
    def step(self) -> TinyStep:
        """A step of the run's own model, or of one that stands in for it."""
        if self.too_large:
            other = _stand_in()
            asked = Asked(other, Configured(other).tokenizer, rows=SUMS)
        else:
            asked = self.asked
        made = TinyStep(asked.config, asked.prompts)
        self.stack.callback(made.close)
        return made

    @cached_property
    def too_large(self) -> str:
        """Why the run's own model is not tried; empty if it is."""
        platform = jax.default_backend()
        limit, count = OWN_MODEL.get(platform, OWN_MODEL_ELSEWHERE), self.named.decoder.parameters
        if self.full or count <= limit:
            return ""
        return f"the model has {count:,} parameters, over {limit:,} for a {platform}"

    def of_machine(self) -> list[Check]:
        """Without which nothing trains."""
        config = self.named.config
        return [
            Check(name="versions", look=machine.versions),
            Check(name="extras", look=machine.extras),
            Check(
                name="devices",
                look=machine.devices,
                remedy="set JAX_PLATFORMS=cpu, or mend the driver that the message names",
            ),
            Check(name="host memory", look=machine.host_memory),
            Check(name="disk", look=lambda: machine.disk(self.named.written())),
            Check(
                name="compilation cache",
                look=lambda: machine.compilation_cache(config.compilation_cache),
                remedy="set compilation_cache to a folder that can be written to, or to ''",
            ),
        ]

    def of_configuration(self) -> list[Check]:
        """Checks of what the configuration names; none without one."""
        if self.config is None:
            return []
        return [
            Check(name="mesh", look=self.named.mesh, needs=("devices",)),
            Check(name="model", look=self.named.model),
            Check(name="memory", look=self.named.memory, needs=("mesh", "model")),
            Check(name="training data", look=lambda: self.asked.data(), needs=("model",)),
            Check(name="evaluation data", look=lambda: self.asked.held_out(), needs=("model",)),
            Check(
                name="grader",
                look=lambda: self.asked.grader(),
                remedy="mend the reward function, or name another in reward.grader",
                needs=("training data",),
            ),
            Check(name="run_dir", look=self.named.run_dir),
            Check(name="metrics", look=self.named.reports),
        ]

    def of_step(self) -> list[Check]:
        """Every phase once."""
        own = self.config is not None
        before = ("mesh", "model", "memory", "training data") if own else ("devices",)
        graded = ("sample", "grader") if own else ("sample",)
        phases: list[tuple[str, Callable[[TinyStep], Found], tuple[str, ...]]] = [
            ("transfer", TinyStep.transfer, (FIRST_PHASE,)),
            ("sample", TinyStep.sample, ("transfer",)),
            ("grade", TinyStep.grade, graded),
            ("update", TinyStep.update, ("sample",)),
            ("agreement", TinyStep.agree, ("update",)),
            ("evaluate", TinyStep.evaluate, ("update",)),
            ("checkpoint", TinyStep.checkpoint, ("update",)),
        ]
        return [
            Check(name=FIRST_PHASE, look=self._weights, needs=before, remedy=_PHASE),
            *(
                Check(name=name, look=lambda look=look: look(self.step), needs=needs, remedy=_PHASE)
                for name, look, needs in phases
            ),
        ]

    def _weights(self) -> Found:
        found = self.step.weights()
        if not self.too_large:
            return found
        return Found(
            message=f"{found.message}, of preset:tiny in its place: {self.too_large}",
            state="warning" if found.state == "ok" else found.state,
            remedy=found.remedy or "--full tries it all the same",
        )


_PHASE = "a run would end with this: see that jax fits the driver, and what `dapo-jax doctor` says without a configuration"


def _stand_in() -> TrainConfig:
    """A tiny model that adds."""
    return TrainConfig(
        run_dir=".",
        model=ModelConfig(source="preset:tiny", tokenizer=f"char:{_ALPHABET}"),
        data=DataConfig(source="rows", prompt_template="{prompt}="),
    )
