// The view of configurations: each run's values next to the defaults, which are the paper's values if the paper gives them.

function startConfiguration(root, data) {
  const { runs } = data;
  root.replaceChildren();
  const nameOf = (run) => (runs.length > 1 ? run.name : "This run");
  const heads = runs.map((run) => el("th", { scope: "col" }, runs.length > 1 ? swatch(run.number) : null, nameOf(run)));
  const facts = [...new Set(runs.flatMap((run) => Object.keys(run.about)))];
  const fact = (name) => el("tr", {}, el("th", { scope: "row" }, name), ...runs.map((run) => el("td", { "data-label": nameOf(run) }, run.about[name] ?? "not recorded")));
  if (facts.length) root.append(el("div", { class: "scroll" }, el("table", { class: "facts" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Run"), ...heads)), el("tbody", {}, ...facts.map(fact)))));
  const rows = data.configuration;
  if (rows.every((row) => row.values.every((value) => value === null))) {
    root.append(el("p", { class: "empty" }, "There is no config.yaml next to these metrics."));
    return root;
  }
  const kinds = [["departs", `Departs from the defaults (${rows.filter((row) => row.departs).length})`]];
  if (runs.length > 1) kinds.unshift(["differs", `Differs between the runs (${rows.filter((row) => row.differs).length})`]);
  kinds.push(["all", `All keys (${rows.length})`]);
  const state = { kind: kinds[0][0], words: "" };
  const body = el("tbody");
  const draw = () => {
    const shown = rows.filter((row) => (state.kind === "all" || row[state.kind]) && row.key.includes(state.words));
    body.replaceChildren(...shown.map((row) => line(row)));
    if (!shown.length) body.append(el("tr", {}, el("td", { colspan: runs.length + 2, class: "empty" }, "None.")));
  };
  const line = (row) => {
    const [section, name] = [row.key.slice(0, row.key.lastIndexOf(".") + 1), row.key.slice(row.key.lastIndexOf(".") + 1)];
    const cell = (value, number) => {
      const label = { "data-label": nameOf(runs[number]) };
      if (value === null) return el("td", { class: "none", ...label }, "not recorded");
      return el("td", { class: value === row.default || row.key === "run_dir" ? "same" : "changed", ...label }, el("code", {}, value));
    };
    return el("tr", {}, el("th", { scope: "row" }, el("span", {}, section), name), ...row.values.map(cell), el("td", { class: "default", "data-label": "Default" }, el("code", {}, row.default)));
  };
  const head = el(
    "tr",
    {},
    el("th", { scope: "col" }, "Key"),
    ...heads.map((head) => head.cloneNode(true)),
    el("th", { scope: "col" }, "Default"),
  );
  const words = el("input", { type: "search", placeholder: "Search keys", "aria-label": "Search keys", oninput: () => {
    state.words = words.value.trim().toLowerCase();
    draw();
  } });
  root.append(
    el("div", { class: "toolbar" }, segmented("Keys", kinds, state.kind, (kind) => {
      state.kind = kind;
      draw();
    }), words, el("span", { class: "hint" }, "Defaults are the paper's where the paper gives a value.")),
    el("div", { class: "scroll" }, el("table", { class: "keys" }, el("thead", {}, head), body)),
  );
  draw();
  return root;
}
