// The view of curves: a line of figures for each run, what is drawn and how, and the panels by section.

function startCurves(root, data) {
  const runs = data.runs;
  const axes = Object.entries(data.axes).filter(([name]) => runs.some((run) => run.axes[name]));
  const charts = [];
  const view = {
    runs,
    axis: "step",
    smoothing: 0.6,
    zoom: null,
    shown: new Set(runs.map((run) => run.number)),
    cursor: null,
    range() {
      if (this.zoom) return this.zoom;
      let high = 0;
      for (const run of runs) if (this.shown.has(run.number)) high = Math.max(high, (run.axes[this.axis] ?? [0]).at(-1));
      return [0, high || 1];
    },
    /** The cursor stands where the nearest run shown has a value. */
    moved(x) {
      const snapped = x === null ? null : snap(x);
      if (snapped === this.cursor) return;
      this.cursor = snapped;
      tellSoon();
    },
    stepped(way) {
      const xs = longest();
      const now = this.cursor === null ? (way > 0 ? -1 : xs.length) : nearest(xs, this.cursor);
      this.cursor = xs[Math.min(xs.length - 1, Math.max(0, now + way))];
      tellSoon();
    },
    zoomed(range) {
      this.zoom = range;
      reset.hidden = range === null;
      drawAll();
    },
  };

  const longest = () => {
    const there = runs.filter((run) => view.shown.has(run.number) && run.axes[view.axis]);
    return there.map((run) => run.axes[view.axis]).sort((a, b) => b.at(-1) - a.at(-1))[0] ?? [0];
  };
  const snap = (x) => {
    const xs = longest();
    return xs[nearest(xs, x)];
  };
  let waiting = false;
  const tellSoon = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      for (const chart of charts) if (chart.drawn) chart.tell();
    });
  };
  const draw = (some) => some.forEach((chart) => {
    chart.drawn = true;
    chart.draw();
  });
  const drawAll = () => {
    for (const chart of charts) if (chart.drawn) chart.draw();
  };

  const reset = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => view.zoomed(null) }, "Whole range");
  const amount = el("output", {}, "0.6");
  const slider = el("input", {
    type: "range", min: "0", max: "0.98", step: "0.02", value: "0.6", id: "smoothing", "aria-label": "Smoothing",
    oninput: () => {
      view.smoothing = Number(slider.value);
      amount.textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
      drawAll();
    },
  });
  amount.textContent = "0.60";
  root.append(
    summary(runs, view, drawAll),
    el(
      "div",
      { class: "toolbar" },
      el("span", { class: "label" }, "Against"),
      segmented("Horizontal axis", axes.map(([name, text]) => [name, AXIS_WORDS[name] ?? name, text]), "step", (axis) => {
        view.axis = axis;
        view.cursor = null;
        view.zoomed(null);
      }),
      el("label", { class: "field" }, el("span", {}, "Smoothing"), slider, amount),
      reset,
      el("span", { class: "hint" }, "Drag over a panel to zoom. Names switch lines on and off; figures are those at the cursor, or the last."),
    ),
  );
  const grid = el("div", { class: "panels" });
  root.append(grid);
  for (const [section, panels] of sections(data.panels)) {
    const made = panels.map((panel) => new Chart(panel, view));
    charts.push(...made);
    if (section === "Other metrics") {
      const inside = el("div", { class: "panels" }, ...made.map((chart) => el("div", { class: "cell" }, chart.node)));
      const box = el("details", { class: "section" }, el("summary", {}, `${section} (${panels.length})`), inside);
      box.addEventListener("toggle", () => box.open && draw(made));
      root.append(box);
    } else {
      // The name of a section stands over its first panel, so that rows stay full.
      grid.append(...made.map((chart, i) => el("div", { class: "cell" }, i ? el("div", { class: "above" }) : el("h2", { class: "above" }, section), chart.node)));
    }
  }
  // When all are there, so that the width is the one that a scroll bar leaves.
  draw(charts.filter((chart) => !chart.node.closest("details")));
  if (data.zero.length) grid.after(el("p", { class: "hint zero" }, `Zero throughout, so not drawn: ${data.zero.join(", ").toLowerCase()}.`));
  // Widths change with the window, and are known only while the view is shown.
  let width = root.clientWidth;
  new ResizeObserver(() => {
    if (!root.clientWidth || root.clientWidth === width) return;
    width = root.clientWidth;
    drawAll();
  }).observe(root);
}

const AXIS_WORDS = { step: "Steps", updates: "Updates", sampled_tokens: "Sampled tokens", clock_s: "Time" };

function sections(panels) {
  const found = new Map();
  panels.forEach((panel, number) => {
    panel.number = number;
    if (!found.has(panel.section)) found.set(panel.section, []);
    found.get(panel.section).push(panel);
  });
  return found;
}

/** A table with a line for each run; its name switches it on and off. */
function summary(runs, view, drawAll) {
  const heldOut = (run) => Object.keys(run.columns).find((key) => /^eval\/.+\/avg@\d+$/.test(key));
  const kinds = new Set(runs.map((run) => heldOut(run)?.split("/").at(-1)).filter(Boolean));
  const columns = [
    ["Run", (run) => runName(run, runs, view, drawAll)],
    ["Step", (run) => progress(run)],
    kinds.size && [`Held-out ${kinds.size === 1 ? [...kinds][0] : "avg@k"}`, (run) => firstAndLast(run, heldOut(run))],
    kinds.size && ["Best", (run) => best(run, heldOut(run))],
    ["Train accuracy", (run) => percent(last(run, "rollout/accuracy"))],
    ["Length", (run) => `${figure(last(run, "rollout/response_tokens"))} tokens`],
    ["Entropy", (run) => figure(last(run, "policy/entropy"))],
    ["Sampled", (run) => `${figure(run.axes.sampled_tokens?.at(-1))} tokens`],
    ["Time", (run) => duration(run.axes.clock_s?.at(-1))],
  ].filter(Boolean);
  const head = el("tr", {}, ...columns.map(([title]) => el("th", { scope: "col" }, title)));
  const lines = runs.map((run) => el("tr", {}, ...columns.map(([, cell]) => el("td", {}, cell(run)))));
  return el("div", { class: "scroll" }, el("table", { class: "summary" }, el("thead", {}, head), el("tbody", {}, ...lines)));
}

function runName(run, runs, view, drawAll) {
  const words = [swatch(run.number), el("span", { title: run.place }, run.name)];
  if (runs.length === 1) return el("b", { class: "run", title: run.place }, run.name);
  const button = el("button", { type: "button", class: "run", "aria-pressed": "true", "data-run": run.number }, ...words);
  button.addEventListener("click", () => {
    const on = !view.shown.delete(run.number);
    if (on) view.shown.add(run.number);
    button.setAttribute("aria-pressed", String(on));
    drawAll();
  });
  return button;
}

const valuesOf = (run, key) => (run.columns[key] ?? []).map((value, i) => [value, i]).filter(([value]) => value !== null);
const last = (run, key) => valuesOf(run, key).at(-1)?.[0] ?? null;

function progress(run) {
  const step = run.axes.step.at(-1);
  return run.steps === null ? figure(step) : `${figure(step)} of ${figure(run.steps)}`;
}

function firstAndLast(run, key) {
  const values = valuesOf(run, key);
  if (!values.length) return "–";
  return values.length === 1 ? percent(values[0][0]) : `${percent(values[0][0])} → ${percent(values.at(-1)[0])}`;
}

function best(run, key) {
  const values = valuesOf(run, key);
  if (!values.length) return "–";
  const [value, place] = values.reduce((a, b) => (b[0] > a[0] ? b : a));
  return `${percent(value)} at step ${run.axes.step[place]}`;
}
