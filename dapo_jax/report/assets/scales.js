// From numbers to places on a panel: ranges, ticks, smoothing, and paths that are no longer than the screen is wide.

/** Round values inside [low, high], about `count` of them; `whole` numbers for what is counted. */
function ticks(low, high, count, whole = false) {
  const rough = Math.max((high - low) / Math.max(1, count), whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const [factors, least] = whole && power < 10 ? [[1, 2, 5, 10], 0.7] : [[1, 2, 2.5, 5, 10], 0.999];
  const step = power * factors.find((factor) => factor * power >= rough * least);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const every = Math.max(1, Math.ceil((last - first) / 5));
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  return found.length > 1 ? found : [low, high];
}

/** The range of an axis that shows all of `values`: from 0 where the values are not far above it. */
function rangeOf(values, log) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || (log && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (log) return [10 ** (Math.floor(4 * Math.log10(low)) / 4), 10 ** (Math.ceil(4 * Math.log10(high)) / 4 + 0.05)];
  if (low === high) {
    const room = low === 0 ? 1 : Math.abs(low) * 0.5;
    return low === 0 ? [0, 1] : [low - room, high + room];
  }
  const room = (high - low) * 0.06;
  if (low >= 0 && low <= 0.6 * high) return [0, high + room];
  return [low - room, high + room];
}

/** value -> pixel. */
function scale([low, high], [from, to], log = false) {
  if (!log) return (value) => from + ((value - low) / (high - low)) * (to - from);
  const [a, b] = [Math.log(low), Math.log(high)];
  return (value) => from + ((Math.log(Math.max(value, low)) - a) / (b - a)) * (to - from);
}

/** How far `value` is from the lowest to the highest of a range, from 0 to 1; half way where these are the same, 0 for what is not known. */
function levelOf(value, [low, high]) {
  if (value === null || Number.isNaN(value)) return 0;
  return low === high ? 0.5 : (value - low) / (high - low);
}

/** [lowest, highest] of numbers, of which some may be NaN. */
function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function rangeText([low, high]) {
  return low <= high ? `from ${figure(low)} to ${figure(high)}` : "not known";
}

/** Exponential means, without the pull of their beginning; nulls stay. `weight` is that of what came before. */
function smoothed(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** [x, y] pairs that are both there. */
function pointsOf(xs, ys) {
  const points = [];
  for (let i = 0; i < ys.length; i += 1) {
    if (ys[i] !== null && ys[i] !== undefined && xs[i] !== null) points.push([xs[i], ys[i], i]);
  }
  return points;
}

/** Of more points than twice the pixels, the lowest and highest of each pixel. */
function thinned(points, x, width) {
  if (points.length <= 2 * width) return points;
  const kept = [];
  let start = 0;
  while (start < points.length) {
    const column = Math.floor(x(points[start][0]));
    let [end, low, high] = [start, start, start];
    while (end < points.length && Math.floor(x(points[end][0])) === column) {
      if (points[end][1] < points[low][1]) low = end;
      if (points[end][1] > points[high][1]) high = end;
      end += 1;
    }
    for (const place of [...new Set([start, Math.min(low, high), Math.max(low, high), end - 1])]) kept.push(points[place]);
    start = end;
  }
  return kept;
}

function pathOf(points, x, y) {
  return points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
}

/** The area between two lines over the same xs. */
function areaOf(upper, lower, x, y) {
  if (!upper.length) return "";
  const back = lower.slice().reverse().map(([a, b]) => `L${x(a).toFixed(1)} ${y(b).toFixed(1)}`);
  return `${pathOf(upper, x, y)}${back.join("")}Z`;
}

/** A round value beside an axis, without digits that say nothing. */
function mark(value) {
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return figure(value).replace(/\.0+(?=[kMGe])/, "");
  return (value < 0 ? MINUS : "") + size.toLocaleString("en-US", { maximumFractionDigits: 6 });
}

/** The place of the value nearest to `wanted` in ascending `xs`, where `there(place)` holds. */
function nearest(xs, wanted, there = () => true) {
  let best = -1;
  for (let i = 0; i < xs.length; i += 1) {
    if (xs[i] === null || !there(i)) continue;
    if (best < 0 || Math.abs(xs[i] - wanted) <= Math.abs(xs[best] - wanted)) best = i;
    else if (xs[i] > wanted) break;
  }
  return best;
}
