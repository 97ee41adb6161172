// Starts the page: the header, the views, and which of them is shown.

function startTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const choose = (tab) => {
    for (const each of tabs) {
      const on = each === tab;
      each.setAttribute("aria-selected", String(on));
      each.tabIndex = on ? 0 : -1;
      document.getElementById(each.getAttribute("aria-controls")).hidden = !on;
    }
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
}

async function start() {
  const data = readJson("data");
  data.runs.forEach((run, number) => {
    run.number = number;
  });
  startTheme(document.getElementById("theme"));
  document.getElementById("made").textContent = `made ${data.made.replace("T", " ").replace("+00:00", " UTC")} · dapo_jax ${data.version}`;
  startTabs();
  startCurves(document.getElementById("curves"), data);
  startConfiguration(document.getElementById("configuration"), data);
  performance.mark("curves-drawn");
  await startRollouts(document.getElementById("rollouts"), data);
  performance.mark("report-ready");
  document.documentElement.dataset.ready = "true";
}

start();
