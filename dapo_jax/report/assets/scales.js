// Converts numbers to positions on a panel: ranges, ticks, smoothing, and paths with few points per pixel.

/** Returns about `count` round values in [low, high]. With `whole`, returns only whole numbers. */
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

/** Returns the range of an axis that shows all `values`. The range begins at 0 if the values are not far above it. */
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

/** Returns a function from values to pixels. */
function scale([low, high], [from, to], log = false) {
  if (!log) return (value) => from + ((value - low) / (high - low)) * (to - from);
  const [a, b] = [Math.log(low), Math.log(high)];
  return (value) => from + ((Math.log(Math.max(value, low)) - a) / (b - a)) * (to - from);
}

/** Returns the position of `value` in a range, from 0 to 1. It is 0.5 if the range is a single value, and 0 if `value` is unknown. */
function levelOf(value, [low, high]) {
  if (value === null || Number.isNaN(value)) return 0;
  return low === high ? 0.5 : (value - low) / (high - low);
}

/** Returns the [lowest, highest] number, ignoring NaN. */
function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function rangeText([low, high]) {
  return low <= high ? `from ${figure(low)} to ${figure(high)}` : "unknown";
}

/** Returns exponential moving averages with bias correction. `weight` is the weight of earlier values. Nulls are kept. */
function smoothed(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** Returns [x, y, index] for each index at which both values exist. */
function pointsOf(xs, ys) {
  const points = [];
  for (let i = 0; i < ys.length; i += 1) {
    if (ys[i] !== null && ys[i] !== undefined && xs[i] !== null) points.push([xs[i], ys[i], i]);
  }
  return points;
}

/** If there are more than two points per pixel, keeps only the first, lowest, highest and last point of each pixel. */
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

/** Returns the path of the area between two lines. */
function areaOf(upper, lower, x, y) {
  if (!upper.length) return "";
  const back = lower.slice().reverse().map(([a, b]) => `L${x(a).toFixed(1)} ${y(b).toFixed(1)}`);
  return `${pathOf(upper, x, y)}${back.join("")}Z`;
}

/** Formats a round value as the label of an axis, without trailing zeros. */
function mark(value) {
  const size = Math.abs(value);
  const sign = value < 0 ? MINUS : "";
  if ((size > 0 && size < 1e-3) || size >= 1e12) return sign + shortPower(Number(size.toPrecision(4)).toExponential());
  const [unit, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e5 ? [1e3, "k"] : [1, ""];
  return sign + (size / unit).toLocaleString("en-US", { maximumFractionDigits: 6 }) + letter;
}

/** Returns the index of the value in ascending `xs` that is nearest to `wanted`, among the indices for which `there` is true. */
function nearest(xs, wanted, there = () => true) {
  let best = -1;
  for (let i = 0; i < xs.length; i += 1) {
    if (xs[i] === null || !there(i)) continue;
    if (best < 0 || Math.abs(xs[i] - wanted) <= Math.abs(xs[best] - wanted)) best = i;
    else if (xs[i] > wanted) break;
  }
  return best;
}
