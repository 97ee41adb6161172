// The distribution of a rollout metric: a column of shades for each logged step, and the histogram of one step.

const [BINS, MOST_COLUMNS, SHADES] = [24, 96, 6];
const HISTOGRAM = { height: 82, bottom: 20, top: 6 };

const DISTRIBUTIONS = [
  ["tokens", "Response lengths", "tokens", "The numbers of sampled tokens: a peak at the right is the length limit."],
  ["reward", "Rewards", "", "The rewards with the overlong penalty: two separate bands are right and wrong responses."],
  ["advantage", "Advantages", "", "The rewards relative to their group: 0 means that a response teaches nothing."],
];

/** Returns the values of a column by logged step: [{from, to, values: [[value, correct]]}]. If there are many steps, they are merged. */
function byStep(store, column) {
  const values = store.columns[column];
  const { flags, group_step: steps } = store.columns;
  const found = new Map();
  for (let group = 0; group < store.groups; group += 1) {
    if (!found.has(steps[group])) found.set(steps[group], []);
    const here = found.get(steps[group]);
    for (let i = store.first(group); i < store.end(group); i += 1) {
      if (!Number.isNaN(values[i])) here.push([values[i], flags[i] & FLAG.correct]);
    }
  }
  const all = [...found].filter(([, here]) => here.length).sort((a, b) => a[0] - b[0]);
  const together = Math.ceil(all.length / MOST_COLUMNS) || 1;
  const columns = [];
  for (let i = 0; i < all.length; i += together) {
    const some = all.slice(i, i + together);
    columns.push({ from: some[0][0], to: some.at(-1)[0], values: some.flatMap(([, here]) => here).sort((a, b) => a[0] - b[0]) });
  }
  return columns;
}

class Heat {
  constructor(store, [column, title, unit, help], view) {
    Object.assign(this, { store, column, title, unit, view });
    this.number = store.run.number;
    const several = view.runs.length > 1;
    this.plot = svg("svg", { role: "img", tabindex: "0", class: "heat" });
    this.bars = svg("svg", { role: "img", class: "bars" });
    this.where = el("span", { class: "where" });
    this.told = el("p", { class: "told" });
    this.node = el(
      "figure",
      { class: "panel distribution", "data-title": several ? `${title}, ${store.run.name}` : title },
      el("figcaption", {}, several ? swatch(this.number) : null, el("b", {}, title), el("span", { class: "unit" }, several ? [unit, store.run.name].filter(Boolean).join(" · ") : unit), this.where),
      this.plot,
      this.bars,
      this.told,
      el("p", { class: "note" }, help),
    );
    this.node.style.setProperty("--c", colour(this.number));
    listenTo(this);
  }

  /** Reloads the values from the store. */
  read() {
    this.columns = byStep(this.store, this.column);
    const all = this.columns.flatMap(({ values }) => values.map(([value]) => value));
    let [low, high] = all.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    if (this.column === "tokens") low = 0;
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    this.range = [low, high];
    this.plot.setAttribute("aria-label", `${this.title} of ${this.store.run.name} by step: shades show shares of the responses, the line is the mean. Left and right arrows move along the steps.`);
  }

  bin(value) {
    const [low, high] = this.range;
    return Math.min(BINS - 1, Math.max(0, Math.floor(((value - low) / (high - low)) * BINS)));
  }

  /** Returns the position of a step on the common horizontal axis, or null if the run has no metrics for the step. */
  at(step) {
    const { axes } = this.store.run;
    if (this.view.axis === "step") return step;
    const place = axes.step.indexOf(step);
    return place < 0 ? null : ((axes[this.view.axis] ?? [])[place] ?? null);
  }

  draw() {
    const shown = this.view.shown.has(this.number);
    this.node.closest(".cell")?.toggleAttribute("hidden", !shown);
    if (!shown) return;
    const width = this.plot.clientWidth || 360;
    this.size = [PLOT.left, width - PLOT.right, PLOT.height - PLOT.bottom, PLOT.top];
    const [left, right, bottom, top] = this.size;
    this.plot.setAttribute("viewBox", `0 0 ${width} ${PLOT.height}`);
    const [low, high] = this.view.range();
    this.x = scale([low, high], [left, right]);
    this.y = scale(this.range, [bottom, top]);
    this.placed = this.columns
      .map((column) => ({ ...column, start: this.at(column.from), end: this.at(column.to) }))
      .filter(({ start, end }) => start !== null && end !== null)
      .map((column) => ({ ...column, x: (column.start + column.end) / 2 }));
    const clip = `clip-heat-${this.number}-${this.column}`;
    this.cursor = svg("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    this.brush = svg("rect", { class: "brush", y: top, height: bottom - top, visibility: "hidden" });
    this.plot.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", { x: left, y: top - 2, width: Math.max(0, right - left), height: bottom - top + 4 })),
      svg("g", { "clip-path": `url(#${clip})` }, ...this.cells(), this.means()),
      ...axesOf({ size: this.size, x: this.x, y: this.y, range: this.range, within: [low, high], axis: this.view.axis, grid: false }),
      this.brush,
      this.cursor,
    );
    this.tell();
  }

  /** Returns one path per shade. */
  cells() {
    const paths = Array.from({ length: SHADES }, () => "");
    const height = (this.size[2] - this.size[3]) / BINS;
    const xs = this.placed.map(({ x }) => x);
    xs.forEach((x, place) => {
      const gap = Math.min(...[xs[place - 1], xs[place + 1]].filter((other) => other !== undefined).map((other) => Math.abs(x - other)), xs.length > 1 ? Infinity : 1);
      const before = place ? (xs[place - 1] + x) / 2 : x - gap / 2;
      const after = place + 1 < xs.length ? (x + xs[place + 1]) / 2 : x + gap / 2;
      const [from, to] = [this.x(before), this.x(after)];
      const counts = this.counts(this.placed[place]);
      counts.forEach(([right, wrong], bin) => {
        const share = (right + wrong) / this.placed[place].values.length;
        if (!share) return;
        const shade = Math.min(SHADES - 1, Math.floor(SHADES * Math.sqrt(share)));
        const y = this.size[2] - (bin + 1) * height;
        paths[shade] += `M${from.toFixed(1)} ${y.toFixed(1)}H${to.toFixed(1)}v${height.toFixed(1)}H${from.toFixed(1)}Z`;
      });
    });
    return paths.map((d, shade) => svg("path", { class: `shade s${shade}`, d }));
  }

  means() {
    const points = this.placed.map(({ x, values }) => [x, meanOf(values)]);
    return svg("path", { class: "mean", d: points.length > 1 ? pathOf(points, this.x, this.y) : "" });
  }

  /** Returns [correct, wrong] for each bin. If the run is judged by scores, all responses count as wrong. */
  counts({ values }) {
    const counts = Array.from({ length: BINS }, () => [0, 0]);
    for (const [value, correct] of values) counts[this.bin(value)][correct && !this.store.run.by_score ? 0 : 1] += 1;
    return counts;
  }

  /** Shows the histogram of the step at the cursor or, without a cursor, of the last step. */
  tell() {
    if (!this.placed?.length || !this.view.shown.has(this.number)) return;
    const { cursor } = this.view;
    const at = nearest(this.placed.map(({ x }) => x), cursor ?? Infinity);
    const column = this.placed[at];
    showCursor(this, cursor === null ? null : column.x);
    const { from, to, values } = column;
    this.where.textContent = from === to ? `step ${from}` : `steps ${from} to ${to}`;
    const [low, middle, high] = [0.05, 0.5, 0.95].map((share) => figure(quantile(values, share)));
    this.told.textContent = `${counted(values.length, "response")}: mean ${figure(meanOf(values))}, median ${middle}, nine in ten from ${low} to ${high}`;
    this.histogram(column);
  }

  histogram(column) {
    const width = this.plot.clientWidth || 360;
    const { height, top } = HISTOGRAM;
    const bottom = height - HISTOGRAM.bottom;
    const [left, right] = this.size;
    const counts = this.counts(column);
    const most = Math.max(...counts.map(([a, b]) => a + b));
    const [each, y] = [(right - left) / BINS, scale([0, most], [bottom, top])];
    const rects = counts.flatMap(([good, bad], bin) => {
      const x = left + bin * each;
      const rect = (kind, from, to) => svg("rect", { class: kind, x: (x + 0.5).toFixed(1), width: Math.max(1, each - 1).toFixed(1), y: y(to).toFixed(1), height: (y(from) - y(to)).toFixed(1) });
      return [good && rect("good", 0, good), bad && rect(this.store.run.by_score ? "even" : "bad", good, good + bad)].filter(Boolean);
    });
    const x = scale(this.range, [left, right]);
    const marks = ticks(...this.range, 4).map((value) => svg("text", { x: x(value), y: bottom + 14, "text-anchor": "middle" }, mark(Number(value.toPrecision(6)))));
    this.bars.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.bars.setAttribute("aria-label", `Histogram: ${this.told.textContent}`);
    this.bars.replaceChildren(
      svg("text", { x: left - 6, y: top + 8, "text-anchor": "end" }, String(most)),
      svg("line", { class: "base", x1: left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 }),
      ...rects,
      ...marks,
    );
  }
}

/** Returns the mean, rounded to 1e-6 because the advantages of a group add up to 0 only up to rounding. */
const meanOf = (values) => Math.round((1e6 * values.reduce((sum, [value]) => sum + value, 0)) / values.length) / 1e6;

/** Returns the quantile at `share` of [value, ...] pairs in ascending order. */
function quantile(values, share) {
  return values[Math.min(values.length - 1, Math.floor(share * values.length))][0];
}
