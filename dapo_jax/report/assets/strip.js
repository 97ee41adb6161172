// One question over time: a bar for each time that it was asked, the higher the better it was answered.

const BAR_HEIGHT = 30;

/** `times` are [{step, level, outcome, current, choose}]: `level` is the bar's height, from 0 to 1, `outcome` says what it stands for;
 * bars of rewards are `even`, neither good nor bad. */
function strip(label, times, even) {
  const bars = times.map(({ step, level, outcome, current, choose }) => {
    const fill = el("i", { class: even ? "even" : null, "aria-hidden": "true" });
    fill.style.height = `${Math.max(2, Math.round(BAR_HEIGHT * level))}px`;
    const words = `step ${step}: ${outcome}`;
    return el("button", { type: "button", class: "bar", title: words, "aria-label": words, "aria-pressed": String(current), onclick: choose }, fill, el("span", { "aria-hidden": "true" }, String(step)));
  });
  const box = el("div", { class: "strip", role: "group", "aria-label": label }, ...bars);
  requestAnimationFrame(() => {
    const at = bars.find((bar) => bar.getAttribute("aria-pressed") === "true");
    if (at) box.scrollLeft = at.offsetLeft - box.offsetLeft - box.clientWidth / 2;
  });
  return box;
}

/** Gives a node other children; who was on a bar is on the one that is pressed then. */
function replaceWithBars(node, children) {
  const onBar = node.contains(document.activeElement) && document.activeElement.classList.contains("bar");
  node.replaceChildren(...children);
  if (onBar) node.querySelector('.bar[aria-pressed="true"]')?.focus();
}

/** The place of the step nearest to `step`, the later of two. */
function nearestStep(steps, step) {
  let best = -1;
  steps.forEach((each, place) => {
    if (best < 0 || Math.abs(each - step) <= Math.abs(steps[best] - step)) best = place;
  });
  return best;
}
