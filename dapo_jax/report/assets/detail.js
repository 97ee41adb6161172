// Shows one group: its prompt, its answer and its responses.

const RESPONSES_AT_FIRST = 16;

class GroupView {
  /** `state` is {wanted, order, words, shading, named}. `goTo(group)` shows another group, and `links(key)` returns links to other
   * views of the same question. */
  constructor(state, { goTo, links }) {
    Object.assign(this, { state, goTo, links });
    this.hint = new Hint();
    this.node = el("div", { class: "group", tabindex: "-1", "aria-live": "off" });
  }

  nothing(words) {
    this.asked = this.shown = null;
    this.node.replaceChildren(el("p", { class: "empty" }, words));
  }

  /** Shows a group. If several are requested before one has loaded, shows the last. */
  show(store, group) {
    this.pending = this.open(store, group);
    return this.pending;
  }

  async open(store, group) {
    const asked = (this.asked = { store, group });
    const texts = await store.texts(group).catch((error) => error);
    if (this.asked !== asked) return;
    if (texts instanceof Error) {
      this.nothing(texts.message);
      return;
    }
    this.shown = { store, group, texts };
    this.limit = RESPONSES_AT_FIRST;
    this.everything = false;
    this.draw();
    this.node.scrollTop = 0;
  }

  draw() {
    if (!this.shown) return;
    const { store, group, texts } = this.shown;
    const { wanted, order, words } = this.state;
    this.hint.show(null);
    const matching = responsesOf(store, group, texts, wanted, order, words);
    const all = texts.responses.map((_, k) => k);
    const places = this.everything ? [...matching, ...all.filter((k) => !matching.includes(k))] : matching;
    const others = all.length - places.length;
    const cards = places.slice(0, this.limit).map((k) => this.card(k, !matching.includes(k)));
    const later = places.length - cards.length;
    const parts = [
      this.heading(),
      el("div", { class: "question" }, el("h3", {}, "Prompt"), marked("pre", texts.prompt, words), el("h3", {}, "Answer"), el("pre", { class: "answer" }, texts.answer)),
      this.history(),
      this.legend(),
      ...cards,
      later > 0 ? this.button(`Show ${counted(later, "more response")}`, () => { this.limit = Infinity; }) : null,
      others > 0 ? this.button(`Show ${counted(others, "response")} of this group that the filters leave out`, () => { this.everything = true; }) : null,
    ];
    replaceWithBars(this.node, parts.filter(Boolean));
  }

  button(text, change) {
    return el("button", { type: "button", class: "more", onclick: () => { change(); this.draw(); } }, text);
  }

  heading() {
    const { store, group } = this.shown;
    const { columns } = store;
    const words = [
      this.state.named() ? el("span", { class: "run" }, swatch(store.run.number), store.run.name) : null,
      el("h2", {}, `Step ${columns.group_step[group]}`),
      el("span", {}, `prompt ${columns.group_ordinal[group].toLocaleString("en-US")}`),
      el("span", {}, store.outcome(group)),
    ];
    const before = columns.group_before[group];
    if (before >= 0) {
      words.push(el("button", { type: "button", class: "link", onclick: () => this.goTo(before) }, `asked before at step ${columns.group_step[before]}: ${store.outcome(before)}`));
    }
    return el("div", { class: "heading" }, ...words, ...this.links(store, store.key(group)));
  }

  /** Returns bars for all logged groups of the same question. */
  history() {
    const { store, group } = this.shown;
    const groups = store.groupsOf(store.key(group));
    if (groups.length < 2) return null;
    const { by_score: byScore } = store.run;
    const times = groups.map((each) => ({
      step: store.columns.group_step[each], level: byScore ? levelOf(store.reward(each), store.rewards()) : store.correct(each) / store.size(each),
      outcome: store.outcome(each), current: each === group, choose: () => this.goTo(each),
    }));
    const bars = byScore ? `: mean rewards, ${rangeText(store.rewards())}, the lowest and highest reward that was logged of the run` : "";
    return el("div", { class: "history" }, el("h3", {}, `This prompt over time, in ${counted(groups.length, "logged group")}${bars}`), strip("This prompt over time", times, byScore));
  }

  legend() {
    const { shading } = this.state;
    const { pieces, clip } = this.shown.store.about;
    const { responses } = this.shown.texts;
    const sample = (kind, text) => el("span", { class: `token ${kind}` }, text);
    const parts = [];
    if (shading === "probability") {
      parts.push("Probability when sampled: ", sample("p0", "<1%"), sample("p1", "<10%"), sample("p2", "<30%"), sample("p3", "<50%"), sample("p4", "<70%"), sample("p5", "<90%"), sample("p6", "<99%"), sample("p7", "more"));
    } else if (shading === "clip" && clip) {
      parts.push(sample("up", `A > 0, ratio > ${(1 + clip.high).toFixed(2)}`), sample("down", `A < 0, ratio < ${(1 - clip.low).toFixed(2)}`));
      if (clip.dual !== null) parts.push(sample("dual", `A < 0, ratio > ${clip.dual}`));
      parts.push(sample("free", "not clipped"), sample("unknown", "not recorded"));
    } else if (shading === "age") {
      parts.push("Sampled by the weights of: ", sample("a0", "this step"), sample("a1", "1 step before"), sample("a2", "2"), sample("a3", "3 or 4"), sample("a4", "5 to 8"), sample("a5", "more"));
      if (!responses.some(isOlder)) parts.push(" All tokens of this group are this step's.");
    }
    if (!pieces && shading !== "none") parts.push(" The run's tokenizer was not found: texts are divided evenly among their tokens.");
    return el("p", { class: "key" }, ...parts);
  }

  card(k, beside) {
    const { store, group, texts } = this.shown;
    const { shading, words } = this.state;
    const response = texts.responses[k];
    const { columns } = store;
    const i = store.first(group) + k;
    const step = columns.group_step[group];
    const drawn = drawnBy(response, step);
    const flags = columns.flags[i];
    const { by_score: byScore } = store.run;
    const fact = (name, value, kind = "") => el("span", { class: `fact ${kind}` }, `${name} `, el("b", {}, value));
    const facts = [
      verdictOf(byScore, response, flags & FLAG.correct),
      fact("reward", byScore ? figure(columns.reward[i]) : signed(columns.reward[i]), "wide"),
      fact("advantage", signed(columns.advantage[i]), "wide"),
      fact("tokens", columns.tokens[i].toLocaleString("en-US"), "wide"),
      response.turns ? fact("in", counted(response.turns.length, "turn")) : null,
      response.forgotten ? fact("turns outside the loss:", response.forgotten.map((turn) => turn + 1).join(", "), "warn") : null,
      response.size > columns.tokens[i] ? fact("the environment's", counted(response.size - columns.tokens[i], "token")) : null,
      fact("ended by", response.finish === "length" ? "the length limit" : "itself", response.finish === "length" ? "warn" : ""),
      columns.penalty[i] ? fact("overlong penalty", signed(columns.penalty[i])) : null,
      columns.clipped[i] ? fact("clipped", String(columns.clipped[i])) : null,
      drawn ? fact("sampled by", drawn) : null,
      flags & FLAG.flipped ? el("span", { class: "badge" }, "flipped to right") : null,
      flags & FLAG.trained ? null : fact("not trained on", ""),
      flags & FLAG.leftOut ? el("span", { class: "badge warn" }, "left out of the loss") : null,
    ];
    return el(
      "article",
      { class: beside ? "response beside" : "response", "aria-label": `Response ${k}` },
      el("header", {}, el("span", { class: "index" }, `#${response.index}`), ...facts),
      ...showTokens(response, response.size ?? columns.tokens[i], { shading, words, hint: this.hint, step }),
      el("p", { class: "why" }, whyOf(byScore, response)),
    );
  }
}

/** The reason of a response without a verdict, because the run does not learn rewards. */
const NOT_GRADED = "not graded";

/** Returns the grader's verdict on a response, or its score. */
function verdictOf(byScore, response, correct) {
  if (response.reason === NOT_GRADED) return el("span", { class: "verdict even" }, NOT_GRADED);
  if (!byScore) return el("span", { class: `verdict ${correct ? "good" : "bad"}` }, correct ? "✓ correct" : "✗ wrong");
  return el("span", { class: "verdict even" }, typeof response.score === "number" ? `score ${figure(response.score)}` : "no score");
}

/** Returns the extracted answer and the grader's reason. Graders that give scores may not extract an answer. */
function whyOf(byScore, { extracted, reason }) {
  if (reason === NOT_GRADED) return "";
  const none = extracted === null || extracted === undefined;
  const read = none ? !byScore && "no answer found" : `answer read: ${extracted}`;
  return [read, reason].filter(Boolean).join(" · ");
}

/** Returns an element with the text, in which `words` (lower case) are marked. */
function marked(name, text, words) {
  const node = el(name, {});
  const lower = text.toLowerCase();
  let from = 0;
  for (let at = words ? lower.indexOf(words) : -1; at >= 0; at = lower.indexOf(words, from)) {
    node.append(text.slice(from, at), el("mark", {}, text.slice(at, at + words.length)));
    from = at + words.length;
  }
  node.append(text.slice(from));
  return node;
}
