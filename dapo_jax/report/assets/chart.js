// One panel: its lines, or its stack, its legend with the values at the cursor, and the cursor itself.
//
// What all panels share is handed in as `view`: {runs, axis, smoothing, zoom, shown, cursor, moved, zoomed}.

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
      el("figcaption", { title: panel.note || null }, el("b", {}, panel.title), el("span", { class: "unit" }, unit), this.where),
      this.plot,
      this.legend,
      panel.note ? el("p", { class: "note" }, panel.note) : null,
    );
    this.listen();
  }

  description() {
    const names = this.panel.series.map((series) => series.label).join(", ");
    return `${this.panel.title}: ${names}. Left and right arrows move along the steps.`;
  }

  runs() {
    return this.view.runs.filter((run) => this.view.shown.has(run.number));
  }

  /** The lines that are drawn: one for each series and run. With one run colours tell series apart, else runs. */
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
      ...this.axes(low, high, range),
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

  /** Layers on one another; a step where all are missing is left out. */
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

  axes(low, high, range) {
    const [left, right, bottom, top] = this.size;
    const nodes = [];
    const label = this.panel.unit === "share" ? (value) => `${mark(Number((100 * value).toPrecision(4)))}%` : mark;
    for (const value of this.panel.log ? logTicks(...range) : ticks(...range, 4)) {
      const y = Math.round(this.y(value)) + 0.5;
      nodes.push(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
      nodes.push(svg("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, label(Number(value.toPrecision(10)))));
    }
    const [divisor, unit] = this.view.axis === "clock_s" ? timeUnit(high) : [1, ""];
    const marks = ticks(low / divisor, high / divisor, Math.max(2, (right - left) / 80));
    for (const at of marks) {
      const x = this.x(at * divisor);
      const text = mark(Number(at.toPrecision(10))) + (at === marks.at(-1) && unit ? ` ${unit}` : "");
      nodes.push(svg("line", { class: "tick", x1: x, x2: x, y1: bottom, y2: bottom + 3 }));
      nodes.push(svg("text", { x, y: bottom + 15, "text-anchor": x > right - 14 ? "end" : "middle" }, text));
    }
    nodes.push(svg("line", { class: "base", x1: left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 }));
    return nodes;
  }

  /** The legend, with the values at the cursor, or the last ones. */
  tell() {
    const { cursor, axis } = this.view;
    const several = this.view.runs.length > 1;
    if (cursor === null) this.cursor.setAttribute("visibility", "hidden");
    else {
      const x = this.x(cursor);
      const seen = x >= this.size[0] - 1 && x <= this.size[1] + 1;
      this.cursor.setAttribute("visibility", seen ? "visible" : "hidden");
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
    }
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
    this.legend.replaceChildren(
      ...there.filter((row) => !isOff(row)).map(([series, place, values]) => el("div", { class: "entry" }, this.toggle(series, place, several), ...values)),
      el("div", { class: "off" }, ...there.filter(isOff).map(([series, place]) => this.toggle(series, place, several))),
    );
  }

  toggle(series, place, several) {
    const sample = svg("svg", { class: "sample", viewBox: "0 0 18 8", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, "stroke-dasharray": several ? DASHES[place % DASHES.length] : "" }));
    sample.style.setProperty("--c", several ? "var(--muted)" : colour(this.panel.stacked ? STACK_COLOURS[place % 4] : place));
    const attributes = { type: "button", "data-series": series.key, "aria-pressed": String(!this.hidden.has(series.key)) };
    const button = el("button", { ...attributes, title: series.label }, sample, el("span", {}, series.label));
    button.addEventListener("click", () => {
      if (!this.hidden.delete(series.key)) this.hidden.add(series.key);
      this.draw();
      this.legend.querySelector(`[data-series="${CSS.escape(series.key)}"]`)?.focus();
    });
    return button;
  }

  listen() {
    let from = null;
    const at = (event) => {
      const [left, right] = this.size;
      const [low, high] = this.view.range();
      const x = Math.min(right, Math.max(left, event.clientX - this.plot.getBoundingClientRect().left));
      return low + ((x - left) / (right - left)) * (high - low);
    };
    this.plot.addEventListener("pointerdown", (event) => {
      from = at(event);
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointermove", (event) => {
      this.view.moved(at(event));
      if (from === null) return;
      const [a, b] = [from, at(event)].sort((one, other) => one - other).map(this.x);
      this.brush.setAttribute("x", a);
      this.brush.setAttribute("width", b - a);
      this.brush.setAttribute("visibility", "visible");
    });
    this.plot.addEventListener("pointerup", (event) => {
      const [a, b] = [from ?? at(event), at(event)].sort((one, other) => one - other);
      from = null;
      this.brush.setAttribute("visibility", "hidden");
      if (this.x(b) - this.x(a) > 8) this.view.zoomed([a, b]);
    });
    this.plot.addEventListener("pointerleave", () => from === null && this.view.moved(null));
    this.plot.addEventListener("dblclick", () => this.view.zoomed(null));
    this.plot.addEventListener("blur", () => this.view.moved(null));
    this.plot.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") this.view.zoomed(null);
      if (way === undefined) return;
      event.preventDefault();
      this.view.stepped(way);
    });
  }
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
