// The view of curves: a table with a line per run, the settings of the plots, and the panels by section.

function startCurves(root, data) {
  const runs = data.runs;
  const charts = new Map();
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
      for (const run of runs) if (this.shown.has(run.number)) high = Math.max(high, (run.axes[this.axis] ?? []).at(-1) ?? 0);
      return [0, high || 1];
    },
    /** Moves the cursor to the nearest value of the longest run that is shown. */
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
    const there = runs.filter((run) => view.shown.has(run.number) && run.axes[view.axis]?.length);
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
      for (const chart of charts.values()) if (chart.drawn) chart.tell();
    });
  };
  const draw = (some) => some.forEach((chart) => {
    chart.drawn = true;
    chart.draw();
  });
  const drawAll = () => {
    for (const chart of charts.values()) if (chart.drawn) chart.draw();
  };

  const reset = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => view.zoomed(null) }, "Whole range");
  const amount = el("output", {}, "0.60");
  const slider = el("input", {
    type: "range", min: "0", max: "0.98", step: "0.02", value: "0.6", id: "smoothing", "aria-label": "Smoothing",
    oninput: () => {
      view.smoothing = Number(slider.value);
      amount.textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
      drawAll();
    },
  });
  const [head, against, grid, zero, others] = ["", "", "panels", "hint zero", ""].map((kind) => el("div", { class: kind }));
  root.append(
    head,
    el(
      "div",
      { class: "toolbar" },
      el("span", { class: "label" }, "Against"),
      against,
      el("label", { class: "field" }, el("span", {}, "Smoothing"), slider, amount),
      reset,
      el("button", { type: "button", class: "quiet", onclick: () => download("metrics.csv", csvOf(data)) }, "Metrics as CSV"),
      el("span", { class: "hint" }, "Drag over a panel to zoom. Click a name to show or hide its line. Values are at the cursor or, without a cursor, the last."),
    ),
    grid,
    zero,
    others,
  );

  /** Returns cells that fill their rows: five panels are three and two, not four and one. */
  const cells = (some) => some.map((chart) => {
    const cell = el("div", { class: "cell" }, chart.node);
    cell.style.setProperty("--across", Math.ceil(some.length / Math.ceil(some.length / MOST_ACROSS)));
    return cell;
  });
  const box = el("details", { class: "section" });
  box.addEventListener("toggle", () => box.open && draw([...charts.values()].filter((chart) => box.contains(chart.node))));
  let heats = [];
  let laid = "";

  /** Arranges the panels in sections, and reuses existing panels. */
  function lay() {
    const found = sections(data.panels);
    for (const panel of data.panels) {
      const name = `${panel.section}/${panel.title}`;
      if (charts.has(name)) charts.get(name).update(panel);
      else charts.set(name, new Chart(panel, view));
    }
    const now = JSON.stringify([data.panels.map((panel) => [panel.section, panel.title]), heats.length]);
    if (now === laid) return;
    laid = now;
    const of = (panels) => cells(panels.map((panel) => charts.get(`${panel.section}/${panel.title}`)));
    const known = [...found].filter(([section]) => section !== OTHER);
    const rest = found.get(OTHER) ?? [];
    grid.replaceChildren(
      ...known.flatMap(([section, panels]) => [el("h2", { class: "above" }, section), ...of(panels)]),
      ...(heats.length ? [el("h2", { class: "above" }, "Distributions over the logged rollouts"), ...cells(heats)] : []),
    );
    box.replaceChildren(el("summary", {}, `${OTHER} (${rest.length})`), el("div", { class: "panels" }, ...of(rest)));
    others.replaceChildren(...(rest.length ? [box] : []));
  }

  function show() {
    const axes = Object.entries(data.axes).filter(([name]) => runs.some((run) => run.axes[name]));
    const focused = head.contains(document.activeElement) ? document.activeElement.dataset.run : null;
    head.replaceChildren(summary(data, view, drawAll));
    if (focused) head.querySelector(`[data-run="${focused}"]`).focus();
    if (against.childElementCount === 0 || against.firstChild.childElementCount !== axes.length) {
      against.replaceChildren(segmented("Horizontal axis", axes.map(([name, text]) => [name, AXIS_WORDS[name] ?? name, text]), view.axis, (axis) => {
        view.axis = axis;
        view.cursor = null;
        view.zoomed(null);
      }));
    }
    zero.textContent = data.zero.length ? `Always zero, so not shown: ${data.zero.join(", ").toLowerCase()}.` : "";
    lay();
    // Drawn after all panels are in the page, because a scroll bar changes their width.
    draw([...charts.values()].filter((chart) => grid.contains(chart.node) || (box.open && box.contains(chart.node))));
  }

  show();
  // Widths change with the window, and can be measured only while the view is visible.
  let width = root.clientWidth;
  new ResizeObserver(() => {
    if (!root.clientWidth || root.clientWidth === width) return;
    width = root.clientWidth;
    drawAll();
  }).observe(root);

  return {
    /** Adds the distributions over the logged rollouts, which take longer to load. */
    distributions(stores) {
      heats = [];
      for (const distribution of DISTRIBUTIONS) {
        const alike = [];
        for (const store of stores) {
          const name = `distributions/${store.run.number}/${distribution[0]}`;
          if (!charts.has(name)) charts.set(name, new Heat(store, distribution, view));
          const heat = charts.get(name);
          heat.read();
          if (heat.columns.length) alike.push(heat);
        }
        // All runs have the same range, so that they can be compared.
        const range = [Math.min(...alike.map((heat) => heat.range[0])), Math.max(...alike.map((heat) => heat.range[1]))];
        for (const heat of alike) heat.range = range;
        heats.push(...alike);
      }
      lay();
      draw(heats);
    },
    /** Shows the current `data`. */
    update: show,
  };
}

const OTHER = "Other metrics";
const MOST_ACROSS = 4;
const AXIS_WORDS = { step: "Steps", updates: "Updates", sampled_tokens: "Sampled tokens", clock_s: "Time" };

/** Returns the metrics of all runs as CSV: a line per run and step, and a column per axis and metric. */
function csvOf({ runs }) {
  const names = (kind) => [...new Set(runs.flatMap((run) => Object.keys(run[kind])))];
  const [axes, columns] = [names("axes"), names("columns")];
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value ?? "");
  const lines = runs.flatMap((run) =>
    run.axes.step.map((_, i) => [run.name, ...axes.map((name) => run.axes[name]?.[i]), ...columns.map((name) => run.columns[name]?.[i])]),
  );
  return [["run", ...axes, ...columns], ...lines].map((line) => `${line.map(cell).join(",")}\r\n`).join("");
}

function sections(panels) {
  const found = new Map();
  panels.forEach((panel, number) => {
    panel.number = number;
    if (!found.has(panel.section)) found.set(panel.section, []);
    found.get(panel.section).push(panel);
  });
  return found;
}

/** Returns a table with a line per run. A click on a run's name shows or hides the run. */
function summary({ runs, made }, view, drawAll) {
  /** A column is for one dataset. A run whose last evaluation lacks this dataset has no value there. */
  const current = runs.map(heldOut);
  const keys = [...new Set(current.flatMap((all) => all.slice(0, 1)))];
  const ofKey = (key, text) => (run) => (current[run.number].includes(key) ? text(run, key) : "–");
  /** If only some of the runs are judged by scores, each figure is labelled. */
  const alike = runs.every((run) => run.by_score === runs[0].by_score);
  const said = (name, text) => (alike || text === "–" ? text : `${name} ${text}`);
  const trained = (run) => (run.by_score ? ["reward", figure(last(run, "reward/mean"))] : ["accuracy", percent(last(run, "rollout/accuracy"))]);
  const columns = [
    ["Run", (run) => runName(run, runs, view, drawAll)],
    ["State", (run) => stateOf(run, made)],
    ["Step", (run) => progress(run)],
    ...keys.flatMap((key) => {
      const [, dataset, metric] = key.match(/^eval\/(.+)\/(.+)$/);
      return [[`Held-out ${metric}\n${dataset}`, ofKey(key, firstAndLast)], [`Best ${metric}\n${dataset}`, ofKey(key, best)]];
    }),
    [alike ? `Train ${trained(runs[0])[0]}` : "Train", (run) => said(...trained(run))],
    ["Length", (run) => `${figure(last(run, "rollout/response_tokens"))} tokens`],
    ["Entropy", (run) => figure(last(run, "policy/entropy"))],
    ["Sampled", (run) => `${figure(run.axes.sampled_tokens?.at(-1))} tokens`],
    ["Time", (run) => duration(run.axes.clock_s?.at(-1))],
  ];
  const head = el("tr", {}, ...columns.map(([title]) => el("th", { scope: "col" }, title)));
  const lines = runs.map((run) => el("tr", {}, ...columns.map(([title, cell]) => el("td", { "data-label": title }, cell(run)))));
  return el("div", { class: "scroll" }, el("table", { class: "summary" }, el("thead", {}, head), el("tbody", {}, ...lines)));
}

function runName(run, runs, view, drawAll) {
  const words = [swatch(run.number), el("span", { title: run.place }, run.name)];
  if (runs.length === 1) return el("b", { class: "run", title: run.place }, run.name);
  const pressed = String(view.shown.has(run.number));
  const button = el("button", { type: "button", class: "run", "aria-pressed": pressed, "data-run": run.number }, ...words);
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

/** Returns the metrics of a run's last evaluation, one for each dataset: its reward if the run is judged by scores, or else its accuracy. */
function heldOut(run) {
  const kind = run.by_score ? /^eval\/.+\/reward$/ : /^eval\/.+\/avg@(\d+|k)$/;
  const ends = Object.keys(run.columns).filter((key) => kind.test(key)).map((key) => [key, valuesOf(run, key).at(-1)?.[1] ?? -1]);
  const end = Math.max(0, ...ends.map(([, place]) => place));
  return ends.filter(([, place]) => place === end).map(([key]) => key);
}

/** Returns the state of a run at the time when the page was made. */
function stateOf({ status: { state, at, reason } }, made) {
  const words = {
    running: [`running`, `last sign of life ${moment(at)}`],
    finished: ["finished", moment(at)],
    stopped: [`stopped${reason ? ` by ${reason}` : ""}`, moment(at)],
    failed: ["ended by an error", moment(at)],
    silent: ["no sign of life", `since ${moment(at)}`],
    unknown: ["unknown", `last written ${moment(at)}`],
  }[state];
  const title = `as of ${moment(made)}`;
  return el("div", { class: `state ${state}`, title }, el("b", {}, words[0]), ` ${words[1]}`, state === "failed" && reason ? el("div", { class: "reason" }, reason) : null);
}

function progress(run) {
  const step = run.axes.step.at(-1) ?? 0;
  return run.steps === null ? figure(step) : `${figure(step)} of ${figure(run.steps)}`;
}

function firstAndLast(run, key) {
  const values = valuesOf(run, key).map(([value]) => value);
  const shown = run.by_score ? figure : percent;
  return values.length === 1 ? shown(values[0]) : `${shown(values[0])} → ${shown(values.at(-1))}`;
}

function best(run, key) {
  const [value, place] = valuesOf(run, key).reduce((a, b) => (b[0] > a[0] ? b : a));
  return `${(run.by_score ? figure : percent)(value)} at step ${run.axes.step[place]}`;
}
