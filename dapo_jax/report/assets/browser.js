// The view of rollouts: search, filters and order at the top; below, the list of groups and the chosen group.

const CHECKS = [
  ["truncated", "truncated", "cut off at the length limit"],
  ["flipped", "flipped to right", "correct, although fewer than half of the responses to the question were correct at the previous logged step with it"],
  ["clipped", "with clipped tokens", "at least one token was clipped in its update"],
  ["trained", "trained on", "it was in an update"],
  ["leftOut", "left out of the loss", "by overlong filtering"],
];
const SHADINGS = [
  ["probability", "Probability"],
  ["clip", "Clip"],
  ["age", "Age", "steps between the weights that sampled a token and this step"],
  ["none", "None"],
];
const FLIPPED = "Flipped to right: a correct response, although fewer than half of the responses to its question were correct at the previous logged step with this question.";
const BARS = "Bars: the rewards of a group's responses, between the lowest and the highest logged reward of the step.";
const PAUSE_MS = 180;

function startRollouts(root, data, { stores, openProblem, changed }) {
  const state = { wanted: {}, order: "step", words: "", shading: "probability", named: () => beside !== null };
  const besideState = { ...state, wanted: { verdict: "any", step: null } };
  let [runs, store, beside, asked] = [[], null, null, 0];
  let base = { found: [], responses: 0 };
  let seen = [];

  const status = el("p", { class: "status", role: "status" });
  const links = (of, key) => (openProblem(of.run, key) ? [el("button", { type: "button", class: "link", onclick: () => openProblem(of.run, key, true) }, "in the evaluations")] : []);
  const view = new GroupView(state, { goTo, links });
  const other = new GroupView(besideState, { goTo: (group) => other.show(beside, group), links });
  const list = new LongList(chosen, { name: "group", label: "Groups", content: groupRow });
  const bar = el("div", { class: "toolbar filters" });
  const pair = el("div", { class: "pair" }, view.node, other.node);
  const explained = el("p", { class: "hint" });
  const columns = el("div", { class: "columns" }, el("div", { class: "side" }, status, list.box, explained), pair);

  function chosen(entry) {
    view.show(store, entry.group);
    showBeside(entry.group);
    changed();
  }

  /** Shows the other run's group for the same question, at the step nearest to this group's step. */
  function showBeside(group) {
    other.node.hidden = beside === null;
    if (beside === null) return;
    const groups = beside.groupsOf(store.key(group));
    if (!groups.length) other.nothing(`${beside.run.name} did not log this prompt.`);
    else other.show(beside, groups[nearestStep(groups.map((each) => beside.columns.group_step[each]), store.columns.group_step[group])]);
  }

  /** Lists the groups that pass the filters, scrolled to the `top` or to the chosen group. Search results are listed as they are found.
   * With `stay`, the reader's position is kept, because groups were only added. */
  async function relist({ top = false, stay = false } = {}) {
    if (top) list.group = undefined;
    const mine = (asked += 1);
    seen = [store.read, beside?.read];
    base = listed(store, state.wanted, state.order);
    if (beside && state.wanted.shared) {
      base.found = base.found.filter((entry) => beside.groupsOf(store.key(entry.group)).length);
      base.responses = base.found.reduce((sum, entry) => sum + entry.count, 0);
    }
    const all = isOpen(state.wanted) && state.wanted.step === null && !state.wanted.shared;
    const of = all ? "" : ` of ${counted(store.rollouts, "response")}`;
    if (!state.words) {
      status.textContent = `${counted(base.responses, "response")} in ${counted(base.found.length, "group")}${of}`;
      show(base.found, stay);
      return;
    }
    if (!stay) status.textContent = "searching …";
    let shown = stay ? list.entries.length : 0;
    await search(store, base.found, state.wanted, state.words, (entries, done, total) => {
      const count = entries.reduce((sum, entry) => sum + entry.count, 0);
      const place = done < total ? `, ${Math.round((100 * done) / total)}% searched` : "";
      status.textContent = `${counted(count, "response")} in ${counted(entries.length, "group")} with “${state.words}”${place}`;
      // Until the search ends, updates the list only if there are new results, because each update rebuilds the whole list.
      if (done === total || entries.length > shown) show(entries, stay, done === total);
      shown = entries.length;
    }, () => mine !== asked);
  }

  /** Until everything is `searched`, the open group stays on the screen, because the search may still find it. */
  function show(entries, stay, searched = true) {
    list.show(store, entries, stay);
    if (!entries.length && !searched) return;
    if (!entries.length) {
      const none = state.wanted.shared && beside && isOpen(state.wanted) && !state.words;
      view.nothing(none ? "The two runs have no logged prompt in common. Runs with the same seed and data use the same prompts." : "No response meets these filters.");
      other.node.hidden = true;
    } else if (list.at < 0) {
      if (searched) list.choose(0);
    } else if (!stay) view.draw();
  }

  function goTo(group) {
    if (!list.entries.some((entry) => entry.group === group)) {
      state.wanted = { ...open() };
      state.words = "";
      fill();
      relist();
    }
    list.choose(list.entries.findIndex((entry) => entry.group === group));
  }

  const open = () => ({ verdict: "any", step: null });

  async function choose(run) {
    store = await stores.get(run.number).open();
    if (beside === store) beside = null;
    state.wanted = { ...open(), shared: beside !== null };
    fill();
    await relist();
  }

  async function chooseBeside(number) {
    beside = number === "" ? null : await stores.get(Number(number)).open();
    state.wanted.shared = beside !== null;
    fill();
    await relist();
    if (list.at >= 0) showBeside(list.entries[list.at].group);
  }

  function fill() {
    const { steps, logged } = store.about;
    const { by_score: byScore } = store.run;
    explained.textContent = byScore ? BARS : FLIPPED;
    const some = (flag) => store.columns.flags.some((flags) => flags & flag);
    const possible = {
      truncated: some(FLAG.truncated), flipped: some(FLAG.flipped), clipped: store.columns.clipped.some(Boolean),
      trained: some(FLAG.trained), leftOut: some(FLAG.leftOut), shared: true,
    };
    let timer = null;
    const words = el("input", {
      type: "search", placeholder: "Search prompts and responses", "aria-label": "Search prompts and responses", value: state.words, id: "search",
      oninput: () => {
        clearTimeout(timer);
        timer = setTimeout(() => {
          state.words = words.value.trim().toLowerCase();
          relist();
        }, PAUSE_MS);
      },
    });
    const check = ([name, text, hint]) => {
      const box = el("input", { type: "checkbox", name, checked: Boolean(state.wanted[name]), disabled: !possible[name], onchange: () => {
        state.wanted[name] = box.checked;
        relist();
      } });
      return el("label", { class: "check", title: possible[name] ? hint : `${hint}: none here` }, box, text);
    };
    const change = (key, read = (value) => value) => (value) => {
      if (key === "order") state.order = besideState.order = value;
      else state.wanted[key] = read(value);
      relist({ top: key === "order" });
    };
    const runOptions = runs.map((run) => [String(run.number), run.name]);
    const ofRun = runs.length > 1
      ? [
          select("Run", runOptions, String(store.run.number), (value) => choose(data.runs[Number(value)])),
          select("Beside", [["", "nothing"], ...runOptions.filter(([number]) => Number(number) !== store.run.number)], beside ? String(beside.run.number) : "", chooseBeside),
        ]
      : [];
    const stepOptions = [["", `all ${steps.length}`], ...steps.map((step) => [String(step), String(step)])];
    const step = state.wanted.step === null || state.wanted.step === undefined ? "" : String(state.wanted.step);
    bar.replaceChildren(...[
      ...ofRun,
      words,
      byScore
        ? segmented("Reward", SIDES, state.wanted.verdict, change("verdict"))
        : segmented("Verdict", VERDICTS, state.wanted.verdict, change("verdict")),
      select("Step", stepOptions, step, change("step", (value) => (value === "" ? null : Number(value)))),
      select("Order", ORDERS, state.order, change("order")),
      segmented("Shade tokens by", SHADINGS, state.shading, (shading) => {
        state.shading = besideState.shading = shading;
        view.draw();
        other.draw();
      }),
      el("div", { class: "checks" }, ...CHECKS.filter(([name]) => !(byScore && name === "flipped")).map(check), beside ? check(SHARED) : null),
      logged > steps.length ? el("span", { class: "hint" }, `${steps.length} of ${logged} logged steps are in this page`) : null,
    ].filter(Boolean));
  }

  /** Shows the current data, and keeps the reader's position. */
  async function update() {
    const before = runs.length;
    runs = data.runs.filter((run) => run.rollouts.steps.length);
    if (!runs.length) {
      const logged = data.runs.some((run) => run.rollouts.logged);
      const words = logged ? "This page was made without the rollouts." : "No rollouts were logged yet. log.rollouts_every_steps sets the steps at which they are logged.";
      root.replaceChildren(el("p", { class: "empty" }, words));
      return;
    }
    if (store === null) {
      root.replaceChildren(bar, columns);
      await choose(runs[0]);
      await view.pending;
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
    /** Shows a group of a run, or the first group if there is no such group. */
    async open(run, group) {
      await choose(run);
      if (group >= 0) goTo(group);
    },
    /** Returns what the address needs to show the same group. */
    place() {
      if (list.group === undefined) return {};
      const { group_step: steps, group_ordinal: ordinals } = store.columns;
      return { run: store.run.number, step: steps[list.group], group: ordinals[list.group] };
    },
  };
}

const SHARED = ["shared", "asked in both runs", "the other run has logged a group of the same prompt"];
