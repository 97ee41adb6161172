// Draws a panel: its lines or stacked layers, a cursor, and a legend with the values at the cursor. Also handles the axes and events of all plots.
//
// All panels share the state `view`: {runs, axis, smoothing, zoom, shown, cursor, moved, zoomed}.

const PLOT = { height: 172, left: 46, right: 10, top: 8, bottom: 22 };
const DASHES = ["", "6 3", "1.5 2.5", "8 3 2 3", "3 3", "10 3"];
const STACK_COLOURS = [2, 5, 1, 3];
const [FEW_POINTS, DOTTED_POINTS] = [24, 12];

class Chart {
  constructor(panel, view) {
    this.panel = panel;
    this.view = view;
    this.hidden = new Set(panel.hidden);
    this.smoothing = () => (panel.exact ? 0 : view.smoothing);
    if (this.hidden.size === panel.series.length) this.hidden.clear();
    this.plot = svg("svg", { role: "img", tabindex: "0", "aria-label": this.description() });
    this.where = el("span", { class: "where" });
    this.legend = el("div", { class: "legend" });
    const unit = panel.unit === "share" ? "" : panel.unit;
    this.node = el(
      "figure",
      { class: "panel", "data-title": panel.title },
      el("figcaption", { title: panel.help }, el("b", {}, panel.title), el("span", { class: "unit" }, unit), this.where),
      this.plot,
      this.legend,
      el("p", { class: "note" }, panel.note ? `${panel.help} ${panel.note[0].toUpperCase()}${panel.note.slice(1)}.` : panel.help),
    );
    listenTo(this);
  }

  /** Replaces the metrics of the panel, for example after a new step. The user's choice of visible series is kept. */
  update(panel) {
    const known = new Set(this.panel.series.map((series) => series.key));
    for (const key of panel.hidden) if (!known.has(key)) this.hidden.add(key);
    this.panel = panel;
    this.plot.setAttribute("aria-label", this.description());
  }

  description() {
    const names = this.panel.series.map((series) => series.label).join(", ");
    return `${this.panel.title}: ${names}. Left and right arrows move along the steps.`;
  }

  runs() {
    return this.view.runs.filter((run) => this.view.shown.has(run.number));
  }

  /** Returns the lines to draw, one per series and run. Colours distinguish the series of a single run, or else the runs. */
  lines() {
    const several = this.view.runs.length > 1;
    const lines = [];
    this.panel.series.forEach((series, place) => {
      if (this.hidden.has(series.key)) return;
      for (const run of this.runs()) {
        const values = run.columns[series.key];
        if (!values) continue;
        const xs = run.axes[this.view.axis] ?? [];
        lines.push({
          series, place, run, xs, values,
          colour: several ? run.number : this.panel.stacked ? STACK_COLOURS[place % 4] : place,
          dash: several ? DASHES[place % DASHES.length] : "",
          error: run.columns[series.band],
        });
      }
    });
    return lines;
  }

  stacks() {
    return this.panel.stacked && this.view.runs.length === 1;
  }

  draw() {
    const width = this.plot.clientWidth || 360;
    this.size = [PLOT.left, width - PLOT.right, PLOT.height - PLOT.bottom, PLOT.top];
    this.plot.setAttribute("viewBox", `0 0 ${width} ${PLOT.height}`);
    const lines = this.lines();
    const [low, high] = this.view.range();
    const inside = (x) => x !== null && x >= low && x <= high;
    this.x = scale([low, high], this.size.slice(0, 2));
    const [range, drawn] = this.stacks() ? this.stacked(lines) : this.plain(lines, inside);
    this.y = scale(range, this.size.slice(2), this.panel.log);
    const clip = `clip-${this.panel.number}`;
    const [left, right, bottom, top] = this.size;
    this.cursor = svg("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    this.brush = svg("rect", { class: "brush", y: top, height: bottom - top, visibility: "hidden" });
    this.plot.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", { x: left - 3, y: top - 3, width: Math.max(0, right - left + 6), height: bottom - top + 6 })),
      ...axesOf({ size: this.size, x: this.x, y: this.y, range, within: [low, high], axis: this.view.axis, grid: true, log: this.panel.log, share: this.panel.unit === "share" }),
      svg("g", { "clip-path": `url(#${clip})` }, ...drawn.flatMap((draw) => draw())),
      this.brush,
      this.cursor,
    );
    this.tell();
  }

  plain(lines, inside) {
    const values = lines.flatMap((line) => line.values.filter((_, i) => inside(line.xs[i])));
    const draws = lines.map((line) => () => this.line(line));
    return [rangeOf(values, this.panel.log), draws];
  }

  line({ xs, values, colour: number, dash, error }) {
    const width = this.size[1] - this.size[0];
    const points = pointsOf(xs, values);
    const few = points.length <= FEW_POINTS;
    const smooth = this.smoothing() > 0 && !few;
    const style = (node) => {
      node.style.setProperty("--c", colour(number));
      return node;
    };
    const path = (shown, kind) =>
      style(svg("path", { class: kind, d: pathOf(thinned(shown, this.x, width), this.x, this.y), "stroke-dasharray": kind === "raw" ? "" : dash }));
    const nodes = [];
    if (error) {
      const around = (sign) => points.map(([x, y, i]) => [x, y + sign * (error[i] ?? 0)]);
      nodes.push(style(svg("path", { class: "band", d: areaOf(around(1), around(-1), this.x, this.y) })));
    }
    if (smooth) {
      nodes.push(path(points, "raw"));
      nodes.push(path(pointsOf(xs, smoothed(values, this.smoothing())), "line"));
    } else {
      nodes.push(path(points, "line"));
    }
    if (points.length <= DOTTED_POINTS) nodes.push(...points.map(([x, y]) => style(svg("circle", { class: "dot", cx: this.x(x).toFixed(1), cy: this.y(y).toFixed(1), r: 2 }))));
    return nodes;
  }

  /** Returns the range and the stacked layers. A step without any values is left out. */
  stacked(lines) {
    const xs = lines[0]?.xs ?? [];
    const smooth = lines.map(({ values }) => (this.smoothing() > 0 ? smoothed(values, this.smoothing()) : values));
    const there = xs.map((x, i) => x !== null && smooth.some((values) => values[i] !== null));
    let below = xs.map(() => 0);
    const layers = lines.map((line, number) => {
      const above = below.map((value, i) => value + (smooth[number][i] ?? 0));
      const layer = { line, lower: below, upper: above };
      below = above;
      return layer;
    });
    const points = (values) => xs.map((x, i) => [x, values[i], i]).filter((_, i) => there[i]);
    const share = this.panel.unit === "share";
    const range = share && !this.hidden.size ? [0, 1] : [0, rangeOf(below, false)[1]];
    const draws = layers.map(({ line, lower, upper }) => () => {
      const width = this.size[1] - this.size[0];
      const area = svg("path", { class: "layer", d: areaOf(thinned(points(upper), this.x, width), thinned(points(lower), this.x, width), this.x, this.y) });
      area.style.setProperty("--c", colour(line.colour));
      return [area];
    });
    return [range, draws];
  }

  /** Updates the legend, which shows the values at the cursor or, without a cursor, the last values. */
  tell() {
    const { cursor, axis } = this.view;
    const several = this.view.runs.length > 1;
    showCursor(this, cursor);
    this.where.textContent = cursor === null ? "" : axisText(axis, cursor);
    const rows = this.panel.series.map((series, place) => {
      const values = this.runs().filter((run) => run.columns[series.key]).map((run) => {
        const column = run.columns[series.key];
        const at = nearest(run.axes[axis] ?? [], cursor ?? Infinity, (i) => column[i] !== null);
        const text = at < 0 ? "–" : this.panel.unit === "share" ? percent(column[at]) : figure(column[at]);
        const cell = el("span", { class: "value", title: this.smoothing() ? "as measured, not smoothed" : null }, text);
        if (several) cell.prepend(swatch(run.number));
        return cell;
      });
      return [series, place, values];
    });
    const there = rows.filter(([, , values]) => values.length);
    this.legend.classList.toggle("many", this.runs().length > 2);
    const isOff = ([series]) => this.hidden.has(series.key);
    const focused = this.legend.contains(document.activeElement) ? document.activeElement.dataset.series : null;
    this.legend.replaceChildren(
      ...there.filter((row) => !isOff(row)).map(([series, place, values]) => el("div", { class: "entry" }, this.toggle(series, place, several), ...values)),
      el("div", { class: "off" }, ...there.filter(isOff).map(([series, place]) => this.toggle(series, place, several))),
    );
    if (focused) this.legend.querySelector(`[data-series="${CSS.escape(focused)}"]`)?.focus();
  }

  toggle(series, place, several) {
    const sample = svg("svg", { class: "sample", viewBox: "0 0 18 8", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, "stroke-dasharray": several ? DASHES[place % DASHES.length] : "" }));
    sample.style.setProperty("--c", several ? "var(--muted)" : colour(this.panel.stacked ? STACK_COLOURS[place % 4] : place));
    const attributes = { type: "button", "data-series": series.key, "aria-pressed": String(!this.hidden.has(series.key)) };
    const button = el("button", { ...attributes, title: series.label }, sample, el("span", {}, series.label));
    button.addEventListener("click", () => {
      if (!this.hidden.delete(series.key)) this.hidden.add(series.key);
      button.focus();  // some browsers do not focus a clicked button
      this.draw();
    });
    return button;
  }
}

/** Returns the lines and labels of a plot's axes. `size` is [left, right, bottom, top], and `within` is the range of the horizontal axis. */
function axesOf({ size: [left, right, bottom, top], x, y, range, within: [low, high], axis, grid, log = false, share = false }) {
  const nodes = [];
  const label = share ? (value) => `${mark(Number((100 * value).toPrecision(4)))}%` : mark;
  for (const value of log ? logTicks(...range) : ticks(...range, 4)) {
    const at = Math.round(y(value)) + 0.5;
    if (grid) nodes.push(svg("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }));
    nodes.push(svg("text", { x: left - 6, y: at + 3.5, "text-anchor": "end" }, label(Number(value.toPrecision(10)))));
  }
  const [divisor, unit] = axis === "clock_s" ? timeUnit(high) : [1, ""];
  const marks = ticks(low / divisor, high / divisor, Math.max(2, (right - left) / 80), axis !== "clock_s");
  for (const value of marks) {
    const at = x(value * divisor);
    const text = mark(Number(value.toPrecision(10))) + (value === marks.at(-1) && unit ? ` ${unit}` : "");
    nodes.push(svg("line", { class: "tick", x1: at, x2: at, y1: bottom, y2: bottom + 3 }));
    nodes.push(svg("text", { x: at, y: bottom + 15, "text-anchor": at > right - 14 ? "end" : "middle" }, text));
  }
  nodes.push(svg("line", { class: "base", x1: left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 }));
  return nodes;
}

/** Moves a plot's cursor to `value` on the horizontal axis, or hides it if `value` is null. */
function showCursor({ cursor, x, size }, value) {
  const at = value === null ? -Infinity : x(value);
  const seen = at >= size[0] - 1 && at <= size[1] + 1;
  cursor.setAttribute("visibility", seen ? "visible" : "hidden");
  if (!seen) return;
  cursor.setAttribute("x1", at);
  cursor.setAttribute("x2", at);
}

/** Handles pointer and key events of a plot: {plot, view, size, x, brush}. */
function listenTo(chart) {
  const { plot, view } = chart;
  let from = null;
  const at = (event) => {
    const [left, right] = chart.size;
    const [low, high] = view.range();
    const x = Math.min(right, Math.max(left, event.clientX - plot.getBoundingClientRect().left));
    return low + ((x - left) / (right - left)) * (high - low);
  };
  plot.addEventListener("pointerdown", (event) => {
    from = at(event);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    view.moved(at(event));
    if (from === null) return;
    const [a, b] = [from, at(event)].sort((one, other) => one - other).map(chart.x);
    chart.brush.setAttribute("x", a);
    chart.brush.setAttribute("width", b - a);
    chart.brush.setAttribute("visibility", "visible");
  });
  plot.addEventListener("pointerup", (event) => {
    const [a, b] = [from ?? at(event), at(event)].sort((one, other) => one - other);
    from = null;
    chart.brush.setAttribute("visibility", "hidden");
    if (chart.x(b) - chart.x(a) > 8) view.zoomed([a, b]);
  });
  plot.addEventListener("pointerleave", () => from === null && view.moved(null));
  plot.addEventListener("dblclick", () => view.zoomed(null));
  plot.addEventListener("blur", () => view.moved(null));
  plot.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") view.zoomed(null);
    if (way === undefined) return;
    event.preventDefault();
    view.stepped(way);
  });
}

function timeUnit(seconds) {
  return seconds < 180 ? [1, "s"] : seconds < 10800 ? [60, "min"] : [3600, "h"];
}

function axisText(axis, value) {
  if (axis === "clock_s") return duration(value);
  const names = { step: "step", updates: "updates", sampled_tokens: "tokens" };
  const shown = figure(Math.round(value));
  return axis === "step" ? `step ${shown}` : `${shown} ${names[axis]}`;
}
