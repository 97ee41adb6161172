// One question over time, with a bar for each time that it was asked. A higher bar means a better result.

const BAR_HEIGHT = 30;

/** Returns the bars of `times`, [{step, level, outcome, current, choose}]. `level` is a bar's height, from 0 to 1, and `outcome` is its meaning.
 * With `even`, bars are neither good nor bad, as for rewards. */
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

/** Replaces the children of a node. If a bar had the focus, the bar that is now pressed gets the focus. */
function replaceWithBars(node, children) {
  const onBar = node.contains(document.activeElement) && document.activeElement.classList.contains("bar");
  node.replaceChildren(...children);
  if (onBar) node.querySelector('.bar[aria-pressed="true"]')?.focus();
}

/** Returns the index of the nearest step. Of two equally near steps, returns the later step's index. */
function nearestStep(steps, step) {
  let best = -1;
  steps.forEach((each, place) => {
    if (best < 0 || Math.abs(each - step) <= Math.abs(steps[best] - step)) best = place;
  });
  return best;
}
