// The view of evaluations: held-out problems with the responses at each evaluation, next to the responses of another run.

const PROBLEM_ORDERS = [
  ["file", "In file order"],
  ["worst", "Worst first"],
  ["gained", "Most gained first"],
  ["lost", "Most lost first"],
];
/** Filters for problems: by the share of correct responses, or for runs judged by scores, by the change of the mean reward. */
const SHARES = [["any", "All"], ["all", "All right"], ["some", "Some right"], ["none", "None right"]];
const CHANGES = [["any", "All"], ["higher", "Higher"], ["lower", "Lower"]];
const EXTRACTED_AT_FIRST = 8;

function startProblems(root, data, { stores, openGroup, changed }) {
  const state = { dataset: null, step: null, order: "file", kind: "any", words: "", everything: false };
  let [runs, store, beside, asked, seen] = [[], null, null, 0, []];
  const status = el("p", { class: "status", role: "status" });
  const bar = el("div", { class: "toolbar filters" });
  const list = new LongList((entry) => show(entry.group), { name: "problem", label: "Problems", content: row });
  const node = el("div", { class: "group", tabindex: "-1" });
  const hint = el("p", { class: "hint" });
  const columns = el("div", { class: "columns" }, el("div", { class: "side" }, status, list.box, hint), node);

  const dataset = () => store.datasets.get(state.dataset);
  /** Returns the evaluation nearest to the chosen step or, if no step is chosen, the last evaluation. */
  const evaluation = (of) => (state.step === null ? of.steps.length - 1 : nearestStep(of.steps, state.step));
  const byScore = () => store.run.by_score;

  function row({ group: place }) {
    const of = dataset();
    const marks = el("span", { class: "marks", "aria-hidden": "true" });
    const first = Math.max(0, of.steps.length - MAX_TICKS);
    for (let at = first; at < of.steps.length; at += 1) {
      const level = store.level(of, at, place);
      const bar = evenMark(level);
      if (store.worth(of, at, place) === null) bar.style.height = "0";
      else if (!byScore()) bar.className = level >= 0.5 ? "good" : "bad";
      marks.append(bar);
    }
    const score = store.score(of, evaluation(of), place);
    const worth = score && (byScore() ? `mean ${figure(store.worth(of, evaluation(of), place))}` : `${score[0]}/${score[1]}`);
    return [
      el("span", { class: "step" }, `problem ${place + 1}`),
      marks,
      el("span", { class: "score" }, worth ?? "not asked"),
      el("span", { class: "head" }, of.heads[place] || "(empty prompt)"),
    ];
  }

  function ordered(of) {
    const [last, at] = [of.steps.length - 1, evaluation(of)];
    const worth = (place, when = at) => store.worth(of, when, place);
    /** Returns the gain from the first to the last evaluation, or 0 if one of them lacks the problem. */
    const gain = (place) => {
      const [before, after] = [worth(place, 0), worth(place, last)];
      return before === null || after === null ? 0 : after - before;
    };
    const weight = { worst: (place) => worth(place) ?? Infinity, gained: (place) => -gain(place), lost: gain }[state.order];
    const meets = {
      any: () => true,
      all: (place) => worth(place) === 1,
      some: (place) => worth(place) > 0 && worth(place) < 1,
      none: (place) => worth(place) === 0,
      higher: (place) => gain(place) > 0,
      lower: (place) => gain(place) < 0,
    }[state.kind];
    const places = of.keys.map((_, place) => place).filter(meets);
    return weight ? places.sort((a, b) => weight(a) - weight(b) || a - b) : places;
  }

  /** Returns the problems whose prompt, answer or responses at the chosen evaluation contain the search words. */
  async function having(of, places) {
    const records = await store.records(of, evaluation(of));
    const found = [];
    for (const place of places) {
      const [prompt, answer] = await store.text(of, place);
      const texts = [prompt, answer, ...(records[place]?.responses ?? []).map((response) => response.text)];
      if (texts.some((text) => has(text, state.words))) found.push(place);
    }
    return found;
  }

  async function relist({ stay = false } = {}) {
    const mine = (asked += 1);
    seen = [store.read, beside?.read];
    const of = dataset();
    let places = ordered(of);
    if (state.words) places = await having(of, places);
    if (mine !== asked) return;
    const at = of.steps[evaluation(of)];
    const worths = places.map((place) => store.worth(of, evaluation(of), place)).filter((worth) => worth !== null);
    const average = worths.reduce((a, b) => a + b, 0) / worths.length;
    const mean = worths.length ? `, ${byScore() ? `mean reward ${figure(average)}` : `${percent(average)} correct`} at step ${at}` : "";
    status.textContent = `${counted(places.length, "problem")}${places.length < of.keys.length ? ` of ${of.keys.length.toLocaleString("en-US")}` : ""}${mean}`;
    list.show(`${store.run.number} ${of.name}`, places.map((group) => ({ group })), stay);
    if (!places.length) {
      shown = null;
      node.replaceChildren(el("p", { class: "empty" }, "No problem meets these filters."));
    } else if (list.at < 0) list.choose(0);
    else await show(list.entries[list.at].group, { stay });
  }

  let shown = null;

  /** Shows a problem, or the error if it cannot be loaded, unless another problem is requested meanwhile. */
  async function show(place, how) {
    const mine = (shown = { place });
    await open(mine, how).catch((error) => {
      if (shown !== mine) return;
      shown = null;
      node.replaceChildren(el("p", { class: "empty" }, error.message));
    });
  }

  async function open(mine, { stay = false } = {}) {
    const { place } = mine;
    changed();
    const of = dataset();
    const [prompt, answer, where] = await store.text(of, place);
    const key = of.keys[place];
    const sides = [[store, of, place]];
    if (beside) {
      const theirs = [...beside.datasets.values()].find((each) => each.name === state.dataset && each.places.has(key)) ?? null;
      sides.push([beside, theirs, theirs?.places.get(key)]);
    }
    const blocks = [];
    for (const side of sides) blocks.push(await column(...side));
    if (shown !== mine) return;
    const top = node.scrollTop;
    const group = openGroup(store.run, key);
    replaceWithBars(node, [
      el(
        "div",
        { class: "heading" },
        el("h2", {}, `Problem ${place + 1}`),
        where === null || where === undefined ? null : el("span", {}, String(where)),
        group ? el("button", { type: "button", class: "link", onclick: () => openGroup(store.run, key, true) }, "also asked in training") : null,
      ),
      el("div", { class: "question" }, el("h3", {}, "Prompt"), marked("pre", prompt, state.words), el("h3", {}, "Answer"), el("pre", { class: "answer" }, answer)),
      el("div", { class: blocks.length > 1 ? "sides two" : "sides" }, ...blocks),
    ]);
    node.scrollTop = stay ? top : 0;
  }

  /** Returns one run's results on a problem: bars over time, and the responses at the chosen evaluation or at every evaluation. */
  async function column(source, of, place) {
    const name = runs.length > 1 ? el("p", { class: "run" }, swatch(source.run.number), source.run.name) : null;
    if (!of) return el("section", {}, name, el("p", { class: "empty" }, `${source.run.name} was not evaluated on this problem.`));
    const chosen = evaluation(of);
    const times = of.steps.map((step, at) => {
      const score = source.score(of, at, place);
      return score && { step, level: source.level(of, at, place), outcome: source.outcome(of, at, place), current: at === chosen && !state.everything, choose: () => {
        state.step = step;
        state.everything = false;
        fill();
        relist();
      } };
    }).filter(Boolean);
    const ats = state.everything ? of.steps.map((_, at) => at).reverse() : [chosen];
    const parts = [];
    for (const at of ats) if (source.score(of, at, place)) parts.push(answers(source, of, at, place, (await source.records(of, at))[place]));
    const [what, range] = source.run.by_score ? ["Mean reward", `, ${rangeText(of.range)}, the dataset's lowest and highest`] : ["Correct", ""];
    return el("section", { "aria-label": source.run.name }, name, el("h3", {}, `${what} at each of ${counted(times.length, "evaluation")}${range}`), strip(`${what} at each evaluation`, times, source.run.by_score), ...parts);
  }

  function answers(source, dataset, at, place, record) {
    const { by_score: scored } = source.run;
    const [, of] = source.score(dataset, at, place);
    const given = (record?.extracted ?? []).filter(([answer]) => !scored || answer !== null);
    const chips = given.slice(0, EXTRACTED_AT_FIRST).map(([answer, count, correct]) =>
      el("li", { class: scored ? null : correct ? "good" : "bad" }, answer === null ? "no answer" : el("code", {}, answer), ` × ${count}`),
    );
    if (given.length > EXTRACTED_AT_FIRST) chips.push(el("li", {}, `and ${counted(given.length - EXTRACTED_AT_FIRST, "more answer")}`));
    const responses = record?.responses ?? [];
    const kept = responses.length ? `${counted(responses.length, "response")} kept of ${of}` : "No response was kept.";
    return el(
      "div",
      { class: "evaluation" },
      el("div", { class: "heading" }, el("h2", {}, `Step ${dataset.steps[at]}`), el("span", {}, source.outcome(dataset, at, place)), el("span", { class: "kept" }, kept)),
      el("ul", { class: "given", "aria-label": "Answers that were read" }, ...chips),
      ...responses.map((response, number) => said(scored, response, number)),
    );
  }

  function said(scored, response, place) {
    const ended = response.finish === "length" ? "the length limit" : "itself";
    return el(
      "article",
      { class: "response", "aria-label": `Response ${place}` },
      el(
        "header",
        {},
        el("span", { class: "index" }, `#${place}`),
        verdictOf(scored, response, response.correct),
        el("span", { class: "fact" }, "tokens ", el("b", {}, figure(response.tokens))),
        el("span", { class: response.finish === "length" ? "fact warn" : "fact" }, "ended by ", el("b", {}, ended)),
      ),
      marked("pre", response.text, state.words),
      el("p", { class: "why" }, whyOf(scored, response)),
    );
  }

  async function choose(run) {
    store = await stores.get(run.number).open();
    if (beside === store) beside = null;
    if (!store.datasets.has(state.dataset)) state.dataset = [...store.datasets.keys()][0];
    if (!(byScore() ? CHANGES : SHARES).some(([kind]) => kind === state.kind)) state.kind = "any";
    fill();
    await relist();
  }

  function fill() {
    let timer = null;
    const words = el("input", {
      type: "search", placeholder: "Search problems and responses", "aria-label": "Search problems and responses", value: state.words,
      oninput: () => {
        clearTimeout(timer);
        timer = setTimeout(() => {
          state.words = words.value.trim().toLowerCase();
          relist();
        }, PAUSE_MS);
      },
    });
    const of = dataset();
    hint.textContent = byScore()
      ? "Bars: the mean reward at each evaluation, between the dataset's lowest and highest. The last evaluation is on the right."
      : "Bars: the share of correct responses at each evaluation. The last evaluation is on the right.";
    const names = [...store.datasets.keys()].map((name) => [name, name]);
    const runOptions = runs.map((run) => [String(run.number), run.name]);
    const steps = [...of.steps].reverse().map((step) => [String(step), String(step)]);
    const change = (name) => (value) => {
      state[name] = value;
      if (name === "dataset") fill();
      if (name === "order") list.group = undefined;
      relist();
    };
    bar.replaceChildren(...[
      runs.length > 1 ? select("Run", runOptions, String(store.run.number), (value) => choose(data.runs[Number(value)])) : null,
      runs.length > 1 ? select("Beside", [["", "nothing"], ...runOptions.filter(([number]) => Number(number) !== store.run.number)], beside ? String(beside.run.number) : "", async (value) => {
        beside = value === "" ? null : await stores.get(Number(value)).open();
        relist();
      }) : null,
      names.length > 1 ? select("Dataset", names, state.dataset, change("dataset")) : null,
      select("At step", [["", "the last"], ...steps], state.step === null ? "" : String(state.step), (value) => {
        state.step = value === "" ? null : Number(value);
        relist();
      }),
      byScore()
        ? el("div", { class: "field" }, el("span", {}, "Since the first"), segmented("Mean reward since the first evaluation", CHANGES, state.kind, change("kind")))
        : segmented("Correct", SHARES, state.kind, change("kind")),
      select("Order", PROBLEM_ORDERS, state.order, change("order")),
      words,
      segmented("Responses of", [["one", "One evaluation"], ["every", "Every evaluation"]], state.everything ? "every" : "one", (value) => {
        state.everything = value === "every";
        relist();
      }),
    ].filter(Boolean));
  }

  async function update() {
    const before = runs.length;
    runs = data.runs.filter((run) => run.evaluations.datasets.length);
    if (!runs.length) {
      const logged = data.runs.some((run) => run.evaluations.logged);
      const words = logged ? "This page was made without the evaluations' problems." : "There was no evaluation yet. eval.every_steps sets the steps of evaluations.";
      root.replaceChildren(el("p", { class: "empty" }, words));
      return;
    }
    if (store === null) {
      root.replaceChildren(bar, columns);
      await choose(runs[0]);
      return;
    }
    await Promise.all([store.open(), beside?.open()]);
    const now = [store.read, beside?.read];
    if (now.every((read, side) => read === seen[side]) && before === runs.length) return;
    if (!bar.contains(document.activeElement)) fill();
    await relist({ stay: true });
  }

  return {
    update,
    /** Shows a problem of a run. */
    async open(run, [name, place], step = state.step) {
      Object.assign(state, { dataset: name, step, words: "", kind: "any" });
      await choose(run);
      const at = list.entries.findIndex((entry) => entry.group === place);
      if (at >= 0) list.choose(at);
    },
    /** Returns what the address needs to show the same problem. */
    place: () => (shown ? { run: store.run.number, dataset: state.dataset, step: dataset().steps[evaluation(dataset())], problem: shown.place + 1 } : {}),
  };
}
