// The view of rollouts: search, filters and order above, the list of groups and the chosen one below.

const CHECKS = [
  ["truncated", "truncated", "cut off at the length limit"],
  ["flipped", "flipped to right", "correct, and when the question was last asked at an earlier logged step, fewer than half of its responses were"],
  ["clipped", "with clipped tokens", "at least one token was clipped in its update"],
  ["trained", "trained on", "it was in an update, as far as that was recorded"],
  ["leftOut", "left out of the loss", "by overlong filtering"],
];
const PAUSE_MS = 180;

async function startRollouts(root, data) {
  const runs = data.runs.filter((run) => run.rollouts.steps.length);
  if (!runs.length) {
    const logged = data.runs.some((run) => run.rollouts.logged);
    const words = logged ? "This page was made without the rollouts." : "No rollouts were logged yet: log.rollouts_every_steps says at which steps they are.";
    root.append(el("p", { class: "empty" }, words));
    return;
  }
  const stores = new Map(runs.map((run) => [run, new Store(run)]));
  const state = { wanted: {}, order: "step", words: "", shading: "probability" };
  let [store, base, asked] = [null, { found: [], responses: 0 }, 0];

  const status = el("p", { class: "status", role: "status" });
  const view = new GroupView(state, (group) => goTo(group));
  const list = new GroupList((entry) => view.show(store, entry.group));
  const bar = el("div", { class: "toolbar filters" });

  /** Lists what the filters leave, from the `top` or where the chosen group is; with words to look for, as they are found. */
  async function relist(top = false) {
    if (top) list.at = -1;
    const mine = (asked += 1);
    base = listed(store, state.wanted, state.order);
    const of = isOpen(state.wanted) && state.wanted.step === null ? "" : ` of ${counted(store.rollouts, "response")}`;
    if (!state.words) {
      status.textContent = `${counted(base.responses, "response")} in ${counted(base.found.length, "group")}${of}`;
      show(base.found);
      return;
    }
    status.textContent = "searching …";
    let shown = 0;
    await search(store, base.found, state.wanted, state.words, (entries, done, total) => {
      const count = entries.reduce((sum, entry) => sum + entry.count, 0);
      const place = done < total ? `, ${Math.round((100 * done) / total)}% searched` : "";
      status.textContent = `${counted(count, "response")} in ${counted(entries.length, "group")} with “${state.words}”${place}`;
      // Until the end only when there is something to see: the list is built anew.
      if (done === total || entries.length > shown) show(entries);
      shown = entries.length;
    }, () => mine !== asked);
  }

  function show(entries) {
    list.show(store, entries);
    if (!entries.length) view.nothing("No response meets these filters.");
    else if (list.at < 0) list.choose(0);
    else view.draw();
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
    store = await stores.get(run).open();
    state.wanted = { ...open() };
    fill();
    await relist();
  }

  function fill() {
    const { recorded, steps, logged } = store.about;
    const some = (flag) => store.columns.flags.some((flags) => flags & flag);
    const possible = {
      truncated: some(FLAG.truncated), flipped: some(FLAG.flipped), clipped: recorded.ratios,
      trained: recorded.ratios || recorded.in_loss, leftOut: some(FLAG.leftOut),
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
      return el("label", { class: "check", title: possible[name] ? hint : `${hint}: none here, or not recorded` }, box, text);
    };
    const change = (key, read = (value) => value) => (value) => {
      if (key === "order") state.order = value;
      else state.wanted[key] = read(value);
      relist(key === "order");
    };
    const ofRun = runs.length > 1
      ? select("Run", runs.map((run) => [String(run.number), run.name]), String(store.run.number), (value) => choose(data.runs[Number(value)]))
      : null;
    const stepOptions = [["", `all ${steps.length}`], ...steps.map((step) => [String(step), String(step)])];
    bar.replaceChildren(...[
      ofRun,
      words,
      segmented("Verdict", [["any", "All"], ["correct", "Correct"], ["wrong", "Wrong"]], state.wanted.verdict, change("verdict")),
      select("Step", stepOptions, "", change("step", (value) => (value === "" ? null : Number(value)))),
      select("Order", ORDERS, state.order, change("order")),
      segmented("Shade tokens by", [["probability", "Probability"], ["clip", "Clip"], ["none", "None"]], state.shading, (shading) => {
        state.shading = shading;
        view.draw();
      }),
      el("div", { class: "checks" }, ...CHECKS.map(check)),
      logged > steps.length ? el("span", { class: "hint" }, `${steps.length} of ${logged} logged steps are in this page`) : null,
    ].filter(Boolean));
  }

  const explained = el("p", { class: "hint" }, "Flipped to right: a correct response to a question that was asked at an earlier logged step, where at the last such step fewer than half of its responses were correct.");
  root.append(bar, el("div", { class: "columns" }, el("div", { class: "side" }, status, list.box, explained), view.node));
  await choose(runs[0]);
  await view.pending;
}
