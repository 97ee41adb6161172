// Starts the page: the header, the views, the tabs, and the links between views.

function startTabs(changed) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const choose = (tab) => {
    for (const each of tabs) {
      const on = each === tab;
      each.setAttribute("aria-selected", String(on));
      each.tabIndex = on ? 0 : -1;
      document.getElementById(each.getAttribute("aria-controls")).hidden = !on;
    }
    tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    changed(tab.getAttribute("aria-controls"));
  };
  tabs.forEach((tab, place) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      const next = tabs[(place + way + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
  choose(tabs[0]);
  return (name) => tabs.filter((tab) => tab.id === `tab-${name}`).forEach(choose);
}

/** Copies newer data into `data` and its runs, which the views share. */
function renew(data, newer) {
  newer.runs.forEach((run, number) => Object.assign(data.runs[number], run));
  for (const name of ["made", "panels", "zero", "configuration"]) data[name] = newer[name];
}

async function start() {
  const data = readJson("data");
  data.runs.forEach((run, number) => {
    run.number = number;
  });
  startTheme(document.getElementById("theme"));
  const made = document.getElementById("made");
  made.textContent = `made ${moment(data.made)} · dapo_jax ${data.version}`;
  let [tab, settled] = ["", false];
  const remember = () => settled && address.set({ tab, ...{ rollouts, evaluations: problems }[tab]?.place() });
  const turnTo = startTabs((name) => {
    tab = name;
    remember();
  });
  const curves = startCurves(document.getElementById("curves"), data);
  const timeline = document.getElementById("timeline");
  startTimeline(timeline, data);
  let configuration = startConfiguration(document.getElementById("configuration"), data);
  performance.mark("curves-drawn");

  const rolloutStores = new Map(data.runs.map((run) => [run.number, new Store(run)]));
  const problemStores = new Map(data.runs.map((run) => [run.number, new ProblemStore(run)]));
  /** Returns whether the run's evaluations include the question. With `go`, shows it there. */
  const openProblem = (run, key, go = false) => {
    const found = problemStores.get(run.number).find(key);
    if (found && go) {
      turnTo("evaluations");
      problems.open(run, found);
    }
    return found !== null;
  };
  const openGroup = (run, key, go = false) => {
    const group = rolloutStores.get(run.number).groupsOf(key).at(-1);
    if (group !== undefined && go) {
      turnTo("rollouts");
      rollouts.open(run, group);
    }
    return group !== undefined;
  };
  const rollouts = startRollouts(document.getElementById("rollouts"), data, { stores: rolloutStores, openProblem, changed: remember });
  const problems = startProblems(document.getElementById("evaluations"), data, { stores: problemStores, openGroup, changed: remember });

  /** Shows the state in the address. */
  async function restore() {
    const { tab: wanted, run, step, group, dataset, problem } = address.get();
    settled = false;
    turnTo(wanted);
    const of = data.runs[run];
    if (wanted === "rollouts" && of?.rollouts.steps.length) await rollouts.open(of, rolloutStores.get(of.number).at(step, group));
    if (wanted === "evaluations" && of?.evaluations.datasets.length) await problems.open(of, [dataset, problem - 1], step && Number(step));
    settled = true;
  }

  async function update() {
    for (const run of data.runs) {
      rolloutStores.get(run.number).about = run.rollouts;
      problemStores.get(run.number).about = run.evaluations;
    }
    await Promise.all([...rolloutStores.values(), ...problemStores.values()].map((store) => store.open()));
    await rollouts.update();
    performance.mark("report-ready");
    await problems.update();
    curves.distributions([...rolloutStores.values()]);
  }
  await update();
  await restore();
  window.addEventListener("hashchange", restore);
  document.documentElement.dataset.ready = "true";

  if (data.watched) {
    watch(made, data.watched, async (newer) => {
      const before = JSON.stringify(data.configuration);
      renew(data, newer);
      curves.update();
      startTimeline(timeline, data);
      if (JSON.stringify(data.configuration) !== before) configuration = startConfiguration(configuration, data);
      await update();
    });
  }
}

start();
