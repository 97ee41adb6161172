// Selects and orders the groups to list, and the responses that pass the filters.

const ORDERS = [
  ["step", "First step first"],
  ["latest", "Last step first"],
  ["advantage", "Highest advantage first"],
  ["negative", "Lowest advantage first"],
  ["reward", "Highest reward first"],
  ["lowest", "Lowest reward first"],
  ["longest", "Longest response first"],
  ["clipped", "Most clipped tokens first"],
];

const VERDICTS = [["any", "All"], ["correct", "Correct"], ["wrong", "Wrong"]];
const SIDES = [["any", "All"], ["above", "Above the group's mean"], ["below", "Below it"]];
/** The value of `Store.side` for responses above or below the mean reward of their group. */
const SIDE = { above: 1, below: -1 };

/** Returns whether response `i` passes the filters. `wanted` is {verdict, truncated, flipped, clipped, trained, leftOut, step}. */
function meets(store, wanted, i) {
  const flags = store.columns.flags[i];
  if (wanted.verdict === "correct" && !(flags & FLAG.correct)) return false;
  if (wanted.verdict === "wrong" && flags & FLAG.correct) return false;
  if (wanted.verdict in SIDE && store.side(i) !== SIDE[wanted.verdict]) return false;
  if (wanted.clipped && !store.columns.clipped[i]) return false;
  return ["truncated", "flipped", "trained", "leftOut"].every((name) => !wanted[name] || flags & FLAG[name]);
}

function isOpen(wanted) {
  return wanted.verdict === "any" && !["truncated", "flipped", "clipped", "trained", "leftOut"].some((name) => wanted[name]);
}

/** Returns the function by which responses are ordered, highest value first. */
function weightOf(store, order) {
  const { advantage, reward, tokens, clipped } = store.columns;
  return {
    advantage: (i) => advantage[i],
    negative: (i) => -advantage[i],
    reward: (i) => reward[i],
    lowest: (i) => -reward[i],
    longest: (i) => tokens[i],
    clipped: (i) => clipped[i],
  }[order];
}

/** Returns the groups with a response that passes the filters, in order, and the number of such responses. */
function listed(store, wanted, order) {
  const weight = weightOf(store, order);
  const found = [];
  let responses = 0;
  for (let group = 0; group < store.groups; group += 1) {
    if (wanted.step !== null && store.columns.group_step[group] !== wanted.step) continue;
    let [count, best] = [0, -Infinity];
    for (let i = store.first(group); i < store.end(group); i += 1) {
      if (!meets(store, wanted, i)) continue;
      count += 1;
      if (weight && weight(i) > best) best = weight(i);
    }
    if (count) found.push({ group, count, best });
    responses += count;
  }
  if (order === "latest") {
    const step = store.columns.group_step;
    found.sort((a, b) => step[b.group] - step[a.group] || a.group - b.group);
  } else if (weight) {
    found.sort((a, b) => b.best - a.best || a.group - b.group);
  }
  return { found, responses };
}

/** Returns, in order, the responses of a group that pass the filters and whose text or prompt contains `words`. */
function responsesOf(store, group, texts, wanted, order, words) {
  const first = store.first(group);
  const places = texts.responses.map((_, k) => k).filter((k) => meets(store, wanted, first + k));
  const weight = weightOf(store, order);
  if (weight) places.sort((a, b) => weight(first + b) - weight(first + a) || a - b);
  if (!words || has(texts.prompt, words)) return places;
  return places.filter((k) => has(texts.responses[k].text, words));
}

const has = (text, words) => text.toLowerCase().includes(words);

const TELL_MS = 250;

/** Searches the prompts and responses of `found` for `words` (in lower case), chunk by chunk.
 *
 * `tell(entries, done, total)` is called at intervals and at the end with the results so far, in the order of `found`.
 * The search ends if `stopped()` returns true. Between two chunks, the browser can handle events.
 */
async function search(store, found, wanted, words, tell, stopped) {
  const chunks = new Map();
  for (const entry of found) {
    const chunk = store.columns.group_chunk[entry.group];
    if (!chunks.has(chunk)) chunks.set(chunk, []);
    chunks.get(chunk).push(entry);
  }
  const hits = new Map();
  let [done, told] = [0, 0];
  for (const [chunk, entries] of chunks) {
    const groups = await store.chunk(chunk);
    if (stopped()) return;
    for (const entry of entries) {
      const texts = groups[store.columns.group_place[entry.group]];
      const count = responsesOf(store, entry.group, texts, wanted, "step", words).length;
      if (count) hits.set(entry.group, count);
    }
    done += 1;
    if (done === chunks.size || performance.now() - told >= TELL_MS) {
      told = performance.now();
      const there = found.filter((entry) => hits.has(entry.group));
      tell(there.map((entry) => ({ ...entry, count: hits.get(entry.group) })), done, chunks.size);
    }
    await breathe();
    if (stopped()) return;
  }
  if (!chunks.size) tell([], 0, 0);
}
