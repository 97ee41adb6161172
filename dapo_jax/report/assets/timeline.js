// The view of time: one strip for each step, in which the colours are the phases of the step.

const MOST_STRIPS = 200;

/** Returns a strip of phases. `whole` is the number of seconds that fills the width. */
function timeStrip(phases, seconds, whole, title) {
  const spent = sumOf(seconds);
  const parts = phases.map((phase, number) => {
    const words = `${phase} ${duration(seconds[number])} (${percent(seconds[number] / (spent || 1))})`;
    const part = el("i", { title: `${title}: ${words}` });
    part.style.setProperty("--c", `var(--phase-${number})`);
    part.style.width = `${(100 * seconds[number]) / (whole || 1)}%`;
    return seconds[number] ? [part, words] : null;
  }).filter((each) => each);
  const label = `${title}: ${parts.map(([, words]) => words).join(", ")}`;
  const strip = el("div", { class: spent > whole * 1.001 ? "phases cut" : "phases", role: "img", "aria-label": label }, ...parts.map(([part]) => part));
  return [strip, el("span", { class: "value" }, duration(spent))];
}

const sumOf = (values) => values.reduce((sum, each) => sum + each, 0);

/** Returns the seconds of each phase, added up over the steps. */
const addedUp = (steps) => steps[0]?.slice(1).map((_, phase) => sumOf(steps.map((step) => step[phase + 1]))) ?? [];

function startTimeline(root, data) {
  const state = { scale: "time", run: 0, ...root.chosen };
  root.chosen = state;
  const draw = () => {
    const { name, timeline } = data.runs[state.run];
    const sums = addedUp(timeline);
    const total = sumOf(sums);
    if (!total) {
      body.replaceChildren(el("p", { class: "empty" }, "This run has logged no times yet."));
      return;
    }
    const legend = data.phases.map((title, number) => {
      if (!sums[number]) return null;
      const mark = el("span", { class: "swatch", "aria-hidden": "true" });
      mark.style.setProperty("--c", `var(--phase-${number})`);
      return el("li", {}, mark, ` ${title} `, el("b", {}, percent(sums[number] / total)), ` ${duration(sums[number])}`);
    });
    const every = Math.ceil(timeline.length / MOST_STRIPS);
    const strips = [];
    for (let first = 0; first < timeline.length; first += every) {
      const steps = timeline.slice(first, first + every);
      strips.push([steps[0][0], steps.at(-1)[0], addedUp(steps).map((each) => each / steps.length)]);
    }
    const lengths = strips.map(([, , seconds]) => sumOf(seconds)).sort((a, b) => a - b);
    // A few long steps, such as the first with its compilation, must not make all others unreadable.
    const whole = Math.min(lengths.at(-1), 1.5 * lengths[Math.floor(0.9 * (lengths.length - 1))]);
    const lines = strips.map(([from, to, seconds]) => {
      const title = from === to ? `step ${from}` : `steps ${from} to ${to}, mean`;
      const width = state.scale === "time" ? whole : sumOf(seconds);
      return el("div", { class: "step" }, el("span", {}, from === to ? String(from) : `${from}–${to}`), ...timeStrip(data.phases, seconds, width, title));
    });
    body.replaceChildren(
      el("div", { class: "step all" }, el("span", {}, "all"), ...timeStrip(data.phases, sums, total, `${name}, all steps`)),
      el("ul", { class: "phase-legend" }, ...legend),
      ...lines,
    );
  };
  const choose = (key) => (value) => {
    state[key] = key === "run" ? Number(value) : value;
    draw();
  };
  const body = el("div", { class: "timeline" });
  const scales = segmented("Width of a strip", [["time", "Seconds"], ["share", "Shares"]], state.scale, choose("scale"));
  const runs = data.runs.length > 1 ? select("Run", data.runs.map((run, number) => [number, run.name]), state.run, choose("run")) : null;
  const hint = "The times of the first process. Grading and waiting occur between parts of the sampling, and are shown after it.";
  root.replaceChildren(el("div", { class: "toolbar" }, ...[runs, scales].filter((each) => each), el("span", { class: "hint" }, hint)), body);
  draw();
}
