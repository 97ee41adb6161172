// A list box for any number of entries. Only the visible rows are in the page.

const ROW_HEIGHT = 46;
const MAX_TICKS = 32;

class LongList {
  /** `content(entry, source)` returns the children of a row, `name` is the prefix of row ids, and `label` is the list's accessible name. */
  constructor(chosen, { name, label, content }) {
    Object.assign(this, { chosen, name, content, entries: [], at: -1, group: undefined });
    this.space = el("div", { class: "space" });
    this.box = el("div", { class: "groups", role: "listbox", tabindex: "0", "aria-label": label }, this.space);
    this.box.addEventListener("scroll", () => this.draw());
    this.box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  /** Shows other entries, each with a `group` in `source`. The chosen entry stays chosen if the new entries include it.
   *
   * With `stay`, the list is not scrolled, because entries were only added.
   */
  show(source, entries, stay = false) {
    if (this.source !== source) this.group = undefined;
    this.source = source;
    this.entries = entries;
    this.at = entries.findIndex((entry) => entry.group === this.group);
    this.space.style.height = `${entries.length * ROW_HEIGHT}px`;
    this.rows = new Map();
    this.space.replaceChildren();
    if (this.at < 0) this.box.scrollTop = 0;
    else if (!stay) this.reveal();
    this.draw();
  }

  /** Scrolls to the chosen row. */
  reveal() {
    const top = this.at * ROW_HEIGHT;
    const { scrollTop, clientHeight } = this.box;
    if (top < scrollTop) this.box.scrollTop = top;
    else if (top + ROW_HEIGHT > scrollTop + clientHeight) this.box.scrollTop = top + ROW_HEIGHT - clientHeight;
  }

  draw() {
    if (!this.source) return;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW_HEIGHT) - 4);
    const height = this.box.clientHeight || 600;
    const end = Math.min(this.entries.length, first + Math.ceil(height / ROW_HEIGHT) + 8);
    for (const [place, row] of this.rows) {
      if (place < first || place >= end) {
        row.remove();
        this.rows.delete(place);
      }
    }
    for (let place = first; place < end; place += 1) {
      if (!this.rows.has(place)) this.rows.set(place, this.row(place));
    }
    for (const [place, row] of this.rows) row.setAttribute("aria-selected", String(place === this.at));
    if (this.rows.has(this.at)) this.box.setAttribute("aria-activedescendant", `${this.name}-${this.at}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  row(place) {
    const row = el(
      "div",
      { class: "row", role: "option", id: `${this.name}-${place}`, "aria-setsize": this.entries.length, "aria-posinset": place + 1, onclick: () => this.choose(place) },
      ...this.content(this.entries[place], this.source),
    );
    row.style.top = `${place * ROW_HEIGHT}px`;
    this.space.append(row);
    return row;
  }

  choose(place) {
    if (!this.entries.length) return;
    this.at = Math.min(this.entries.length - 1, Math.max(0, place));
    this.group = this.entries[this.at].group;
    this.reveal();
    this.draw();
    this.chosen(this.entries[this.at]);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW_HEIGHT) - 1);
    const to = {
      ArrowDown: this.at + 1, ArrowUp: this.at - 1, PageDown: this.at + page, PageUp: this.at - page,
      Home: 0, End: this.entries.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(to);
  }
}

/** Returns a bar for a row that is neither good nor bad. `level` is its height, from 0 to 1. */
function evenMark(level) {
  const node = el("i", { class: "even" });
  node.style.height = `${Math.max(2, Math.round(12 * level))}px`;
  return node;
}

/** Returns the children of a row for a group of rollouts. */
function groupRow({ group, count }, store) {
  const { columns } = store;
  const [first, end] = [store.first(group), store.end(group)];
  const { by_score: byScore } = store.run;
  const step = columns.group_step[group];
  const marks = el("span", { class: "marks", "aria-hidden": "true" });
  for (let i = first; i < Math.min(end, first + MAX_TICKS); i += 1) {
    if (byScore) marks.append(evenMark(levelOf(columns.reward[i], store.rewards(step))));
    else marks.append(el("i", { class: columns.flags[i] & FLAG.correct ? "good" : "bad" }));
  }
  const size = end - first;
  const part = count < size ? `, ${count} shown` : "";
  return [
    el("span", { class: "step" }, `step ${step}`),
    marks,
    el("span", { class: "score" }, `${byScore ? `mean ${figure(store.reward(group))}` : `${store.correct(group)}/${size}`}${part}`),
    el("span", { class: "head" }, store.head(group) || "(empty prompt)"),
  ];
}
