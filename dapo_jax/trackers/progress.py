"""Displays the progress of a run: a live view in a terminal or notebook, otherwise one short line per step.

step  12/120  reward 0.218  acc 0.61  len 18.2  entropy 0.41  4.1k tok/s  1.9 s/step  eta 3m20s
"""

import importlib.util
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dapo_jax.config.keys import without_secrets
from dapo_jax.terminal import visible

_COUNTED = re.compile(r"[^/]+@(\d+)")
"""Matches the names of metrics over k samples, such as avg@8, but not of their standard errors."""

_RECENT_STEPS = 20
_QUIET_S = 15.0
"""Plain output reports the progress of sampling if it has printed nothing for this many seconds."""
_TITLES = {"acc": "accuracy", "len": "tokens", "tok/s": "sampled tok/s"}
"""Metrics that have a longer name in the live view than in a printed line."""


class Progress:
    """Shows the progress of a run. The live view appears only inside the context manager; outside it, calls print plain lines.

    Missing and nan metrics are shown as "-". No signal handler is installed. The terminal is restored after an exception or an interrupt. If `metric`, which is
    `dynamic_sampling.metric`, is `score`, accuracies are not shown. `console` defaults to standard output, and `clock` returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        metric: str = "correct",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._counts = metric == "correct"
        self._console = console or Console()
        self._clock = clock
        self._step = 0
        self._metrics: dict[str, float | int] = {}
        self._evaluations: dict[str, str] = {}
        self._phase: tuple[str, int | None, int | None] = ("starting", None, None)
        self._phase_start = self._printed = clock()
        self._wave = ""
        # Times at which steps ended. Their differences include evaluations and checkpoints, but not the compilation in the first step.
        self._step_ends: deque[float] = deque(maxlen=_RECENT_STEPS + 1)
        self._listener: Callable[[str, int | None, int | None], None] = lambda name, done, total: None
        self._live = Live(get_renderable=self._view, console=self._console, refresh_per_second=4)

    def __enter__(self) -> "Progress":
        if _can_redraw(self._console):
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live.is_started:
            self._live.stop()

    def listen(self, listener: Callable[[str, int | None, int | None], None]) -> None:
        """Registers a callback, to which `phase` passes its arguments on every call."""
        self._listener = listener

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Sets the current phase and its progress, which only the live view shows."""
        self._listener(name, done, total)
        if name != self._phase[0]:
            self._phase_start = self._clock()
        self._phase = (name, done, total)

    def starting(self, what: str) -> None:
        """Announces a slow preparation for the first step, such as compilation, as a phase in the live view or as a printed line."""
        self.phase(what)
        if not _can_redraw(self._console):
            self.message(f"{what} ...")

    def begin(self, step: int) -> None:
        """Sets the number of the last finished step, which a resumed run loads from its checkpoint."""
        self._step = step

    def wave(self, words: str) -> None:
        """Shows the progress of sampling until the step ends. Plain output shows it after `_QUIET_S` seconds without output."""
        self._wave = words
        if not self._live.is_started and self._clock() - self._printed >= _QUIET_S:
            self.message(f"step {self._step + 1}  sampling: {words}")

    def step(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Shows the metrics of a finished step; steps are counted from 1 to `total_steps`."""
        self._step = step
        self._metrics, self._wave = dict(metrics), ""
        self._step_ends.append(self._clock())
        if not self._live.is_started:
            self.message(self.line())

    def evaluation(self, name: str, metrics: Mapping[str, float | int], step: int) -> None:
        """Shows the evaluation results on dataset `name`: the metrics over all k samples, such as `eval/NAME/avg@8`, and the mean reward.

        pass@j for j < k is not shown, but is in metrics.jsonl.
        """
        found = {key.removeprefix(f"eval/{name}/"): value for key, value in metrics.items()}
        samples = {key: int(match[1]) for key in found if self._counts and (match := _COUNTED.fullmatch(key))}
        counted = [key for key, count in samples.items() if count == max(samples.values())]
        shown = []
        for key in [*sorted(counted), *["reward"] * ("reward" in found)]:
            form, error = ".3g" if key == "reward" else ".2f", found.get(f"{key}_stderr")
            spread = "" if error is None else f" ± {_formatted(error, form)}"
            shown.append(f"{key} {_formatted(found[key], form)}{spread}")
        result = "  ".join(shown) or "-"
        # A new dict, because the live view's thread may be iterating over the old dict.
        self._evaluations = self._evaluations | {name: f"{result}  (step {step})"}
        if not self._live.is_started:
            self.message(f"eval  {name}  {self._evaluations[name]}")

    def message(self, text: str) -> None:
        """Prints a permanent line above the live view, as plain text without markup, highlighting or wrapping."""
        self._printed = self._clock()
        self._console.print(visible(without_secrets(text)), markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """Returns the metrics of the last step as one short line."""
        cells, lost = self._cells(), self._metrics.get("reward/lost")
        width = len(str(self.total_steps))
        return "  ".join(
            [
                f"step {self._step:>{width}}/{self.total_steps}",
                *(f"{name} {value}" for name, value in cells.items() if "/s" not in name),
                *([f"lost {lost:.0f}"] if lost else []),
                *(f"{value} {name}" for name, value in cells.items() if "/s" in name),
                f"eta {self._eta()}",
            ]
        )

    def _cells(self) -> dict[str, str]:
        """Returns the metrics of the last step as formatted text, by their names in the view."""
        measured = self._metrics.get
        return {
            "reward": _formatted(measured("reward/mean"), ".3g"),
            **({"acc": _formatted(measured("rollout/accuracy"), ".2f")} if self._counts else {}),
            "len": _formatted(measured("rollout/response_tokens"), ".1f"),
            "entropy": _formatted(measured("policy/entropy"), ".2f"),
            "tok/s": _thousands(measured("speed/sampled_tokens_per_s")),
            "s/step": _formatted(measured("time/step_s"), ".1f"),
        }

    def _eta(self) -> str:
        if self._step >= self.total_steps:
            return "0s"
        if len(self._step_ends) > 1:
            step_s = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        else:
            step_s = self._metrics.get("time/step_s", math.nan)
        return format_seconds((self.total_steps - self._step) * step_s)

    def _view(self) -> RenderableType:
        """Returns the live view: the progress, the last step's metrics, and the last evaluations."""
        name, done, total = self._phase
        bars = Table.grid(padding=(0, 2, 0, 0))
        bars.add_row(
            "step",
            Text(f"{self._step}/{self.total_steps}", style="bold"),
            ProgressBar(self.total_steps, self._step, width=32),
            f"eta {self._eta()}",
        )
        counted = done is not None and bool(total)
        bars.add_row(
            Text(name),
            f"{done}/{total}" if counted else "" if done is None else str(done),
            ProgressBar(total, done or 0, width=32) if counted else "",
            format_seconds(self._clock() - self._phase_start),
        )

        numbers, cells = Table.grid(padding=(0, 3, 0, 0)), self._cells()
        numbers.add_row(*(Text(_TITLES.get(name, name), style="dim") for name in cells))
        numbers.add_row(*(Text(value, style="bold") for value in cells.values()))

        held_out = [Text(f"{name}  {result}") for name, result in self._evaluations.items()] or [Text("-")]
        evaluations = Table.grid(padding=(0, 2, 0, 0))
        evaluations.add_row(Text("held out", style="dim"), Group(*held_out))
        return Panel(
            Group(bars, Text(self._wave, style="dim"), numbers, "", evaluations),
            title="dapo_jax",
            width=78,
            title_align="left",
        )


def format_seconds(seconds: float) -> str:
    """Formats a duration in its two largest units.

    >>> [format_seconds(s) for s in (7.4, 200.0, 3900.0, 183600.0)]
    ['7s', '3m20s', '1h05m', '2d03h']
    """
    if not math.isfinite(seconds):
        return "-"
    whole = max(round(seconds), 0)
    for size, unit, rest, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // rest:02d}{small}"
    return f"{whole}s"


def _formatted(value: float | int | None, form: str) -> str:
    return f"{value:{form}}" if value is not None and math.isfinite(value) else "-"


def _thousands(value: float | int | None) -> str:
    """Formats a number with at most three digits, in thousands or millions if it is large.

    >>> [_thousands(value) for value in (0.4, 87.2, 999.4, 999.6, 9949, 9951, 1.3e6)]
    ['0', '87', '999', '1.0k', '9.9k', '10k', '1.3M']
    """
    if value is None or not math.isfinite(value):
        return "-"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{1 if scaled < 9.95 else 0}f}{letter}"
    return f"{value:.0f}"


def _can_redraw(console: Console) -> bool:
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None  # otherwise, rich only warns
    return console.is_terminal and not console.is_dumb_terminal
