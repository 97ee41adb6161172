// A response as tokens, shaded by what is known of each, with one hint for the token under the pointer or the cursor.

const TOKENS_AT_FIRST = 600;
const PROBABILITIES = [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99];
const CLIPS = {
  "^": ["up", "clipped from above: no gradient"],
  v: ["down", "clipped from below: no gradient"],
  d: ["dual", "over the dual clip"],
  ".": ["free", "not clipped"],
  "-": ["unknown", "ratio not recorded"],
};
/** Shades of ages: a0 is this step's weights, a1 those of the step before; the last is for what is older than all of these. */
const AGES = [0, 1, 2, 4, 8];

/** Text and place of each piece: {text, from, to, start}, where tokens that make up one character are one piece. */
function piecesOf(response, count) {
  const { text } = response;
  if (!response.lengths) {
    const border = (i) => Math.round((i * text.length) / Math.max(1, count));
    const even = Array.from({ length: count }, (_, i) => ({ text: text.slice(border(i), border(i + 1)), from: i, to: i + 1, start: border(i) }));
    return even.filter((piece) => piece.text);
  }
  const pieces = [];
  let [start, from] = [0, 0];
  response.lengths.forEach((length, i) => {
    if (!length) return;
    pieces.push({ text: text.slice(start, start + length), from, to: i + 1, start });
    start += length;
    from = i + 1;
  });
  // What follows the text is the end token, which has none.
  for (let i = from; i < response.lengths.length; i += 1) pieces.push({ text: "", from: i, to: i + 1, start });
  return pieces;
}

function probabilityOf(response, piece) {
  if (!response.nats) return null;
  const nats = response.nats.slice(piece.from, piece.to);
  return nats.includes(null) ? null : Math.exp(Math.min(...nats.map((value) => -value)) / 1000);
}

function clipOf(response, piece) {
  if (!response.clips) return null;
  const states = response.clips.slice(piece.from, piece.to);
  return [..."^vd"].find((state) => states.includes(state)) ?? states[0];
}

/** How many steps before this one the weights were that drew a token; null if that was not recorded. */
function ageAt(response, token) {
  return response.ages?.findLast(([first]) => first <= token)[1] ?? null;
}

/** Of several tokens that make up one character the last one counts: it has the text. */
const ageOf = (response, piece) => ageAt(response, piece.to - 1);

/** True if earlier weights than this step's drew some of a response. */
const isOlder = (response) => (response.ages?.[0][1] ?? 0) > 0;

/** Which turn of an episode a token is of; -1 if the environment appended it, null where there are no turns. */
function turnAt(response, token) {
  return response.turns ? response.turns.findIndex(([first, stop]) => first <= token && token < stop) : null;
}

/** The shade of a piece: p0 is the least probable. */
function shadeOf(response, piece, shading) {
  if (turnAt(response, piece.from) === -1) return "environment";
  if (shading === "probability") {
    const probability = probabilityOf(response, piece);
    if (probability === null) return "unknown";
    const bin = PROBABILITIES.findIndex((limit) => probability < limit);
    return `p${bin < 0 ? PROBABILITIES.length : bin}`;
  }
  if (shading === "clip") return CLIPS[clipOf(response, piece) ?? "-"][0];
  if (shading === "age") {
    const age = ageOf(response, piece);
    if (age === null) return "unknown";
    const bin = AGES.findIndex((limit) => age <= limit);
    return `a${bin < 0 ? AGES.length : bin}`;
  }
  return "plain";
}

/** Pieces that overlap with a place where `words` (lower case) are found. */
function hitsOf(text, words) {
  const hits = [];
  if (!words) return () => false;
  const lower = text.toLowerCase();
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, at + words.length)) hits.push([at, at + words.length]);
  return (piece) => hits.some(([from, to]) => piece.start < to && piece.start + piece.text.length > from);
}

/** `step` is the one at which the response was logged. */
function showTokens(response, count, { shading, words, hint, step }) {
  const pieces = piecesOf(response, count);
  const hit = hitsOf(response.text, words);
  const graded = response.graded ?? Infinity;
  const body = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `Response of ${counted(count, "token")}; arrows go through the tokens` });
  /** Where other weights take over: a word that says of which step they are. */
  const change = (piece, place) => {
    if (shading !== "age" || !isOlder(response)) return null;
    const age = ageOf(response, piece);
    if (place && age === ageOf(response, pieces[place - 1])) return null;
    return el("small", { class: "since" }, `step ${step - age}`);
  };
  /** Where a turn begins: which, and what it was worth. */
  const turnOf = (piece, place) => {
    const turn = turnAt(response, piece.from);
    if (turn === null || turn < 0 || (place && turnAt(response, pieces[place - 1].from) === turn)) return null;
    const reward = response.turns[turn][2];
    return el("small", { class: "since" }, `turn ${turn + 1}${reward === null ? "" : `, reward ${signed(reward)}`}`);
  };
  /** Where the environment began a context anew, in place of all before it. */
  const contextOf = (piece) =>
    response.contexts?.some((first) => piece.from <= first && first < piece.to) ? el("small", { class: "since" }, "new context") : null;
  const node = (piece, place) => {
    const kinds = ["token", shadeOf(response, piece, shading)];
    if (hit(piece)) kinds.push("hit");
    if (piece.start >= graded) kinds.push("ungraded");
    if (/\n$/.test(piece.text)) kinds.push("newline");
    if (!piece.text) kinds.push("end");
    return el("span", { class: kinds.join(" "), "data-place": place }, contextOf(piece), turnOf(piece, place), change(piece, place), piece.text || "end");
  };
  const fill = (limit) => body.replaceChildren(...pieces.slice(0, limit).map(node));
  fill(TOKENS_AT_FIRST);
  if (!pieces.length) body.append(el("span", { class: "none" }, "(no tokens)"));

  let at = -1;
  const show = (place) => {
    body.querySelector(".at")?.classList.remove("at");
    at = place;
    const span = at < 0 ? null : body.children[at];
    span?.classList.add("at");
    hint.show(span, span && describe(response, pieces[at], step));
  };
  body.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".token");
    if (span) show(Number(span.dataset.place));
  });
  body.addEventListener("pointerleave", () => show(-1));
  body.addEventListener("blur", () => show(-1));
  body.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: body.children.length - 1 }[event.key];
    if (to === undefined || !pieces.length) return;
    event.preventDefault();
    show(Math.min(body.children.length - 1, Math.max(0, to)));
  });
  const more = pieces.length - TOKENS_AT_FIRST;
  if (more <= 0) return [body];
  const button = el("button", { type: "button", class: "more" }, `Show ${counted(more, "more token")}`);
  button.addEventListener("click", () => {
    fill(pieces.length);
    button.remove();
    body.focus();
  });
  return [body, button];
}

/** What is known of a piece, as lines. */
function describe(response, piece, step) {
  const lines = [];
  const whole = response.lengths ? "" : " (borders not known)";
  lines.push(piece.to - piece.from > 1 ? `tokens ${piece.from + 1} to ${piece.to}, one character` : `token ${piece.from + 1}${whole}`);
  const turn = turnAt(response, piece.from);
  if (turn === -1) return [...lines, "appended by the environment"];
  if (turn !== null) lines.push(`turn ${turn + 1} of ${response.turns.length}`);
  for (let i = piece.from; i < piece.to; i += 1) {
    const nats = response.nats?.[i];
    const probability = nats === undefined || nats === null ? "not recorded" : shownProbability(Math.exp(-nats / 1000));
    lines.push(`probability ${probability}`);
    const ratio = response.ratios?.[i];
    const state = response.clips?.[i];
    if (ratio !== undefined && ratio !== null) lines.push(`ratio ${(ratio / 10000).toFixed(3)}${state ? `, ${CLIPS[state][1]}` : ""}`);
    const age = ageAt(response, i);
    if (age !== null) lines.push(`drawn by the weights of ${ofStep(step, age)}`);
  }
  if (piece.start >= (response.graded ?? Infinity)) lines.push("not seen by the grader: the stop string");
  return lines;
}

/** The step that drew something with the weights that it began with. */
function ofStep(step, age) {
  return age ? `step ${step - age}, ${counted(age, "step")} before` : "this step";
}

/** Whose weights drew a response, where these are not this step's alone. */
function drawnBy(response, step) {
  if (!isOlder(response)) return null;
  const [[, oldest], newest] = [response.ages[0], response.ages.at(-1)[1]];
  if (response.ages.length === 1) return `the weights of ${ofStep(step, oldest)}`;
  return `${response.ages.length} versions of the weights, steps ${step - oldest} to ${step - newest}`;
}

function shownProbability(value) {
  return value < 0.0001 ? value.toExponential(1).replace("e-", `e${MINUS}`) : value.toPrecision(3);
}

/** The one hint of the page, below or above what it speaks of. */
class Hint {
  constructor() {
    this.node = el("div", { class: "tip", role: "status", hidden: true });
    document.body.append(this.node);
  }

  show(anchor, lines) {
    this.node.hidden = !anchor;
    if (!anchor) return;
    this.node.replaceChildren(...lines.map((line) => el("div", {}, line)));
    const box = anchor.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const below = box.bottom + 6 + height < innerHeight;
    this.node.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, box.left))}px`;
    this.node.style.top = `${below ? box.bottom + 6 : box.top - height - 6}px`;
  }
}
