// Shows a response as shaded tokens, with a hint for the token under the pointer or the cursor.

const TOKENS_AT_FIRST = 600;
/** Numbers of tokens of an episode that are shown at first: in total, at least per turn, and at most and at least per text of the environment. */
const EPISODE = { tokens: 900, turn: 60, environment: 120, least: 24 };
/** A part is shown as a whole if it would have fewer hidden tokens than this share of its shown tokens. */
const NOT_WORTH_HIDING = 0.25;
const PROBABILITIES = [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99];
const CLIPS = {
  "^": ["up", "clipped from above: no gradient"],
  v: ["down", "clipped from below: no gradient"],
  d: ["dual", "over the dual clip"],
  ".": ["free", "not clipped"],
  "-": ["unknown", "ratio not recorded"],
};
/** Limits of the shades for ages. a0 marks the weights of this step, a1 the weights of the step before, and the last shade all older weights. */
const AGES = [0, 1, 2, 4, 8];

/** Returns the pieces of a response: {text, from, to, start}. Tokens that form one character are one piece. No piece extends from a turn of an episode
 * into the environment's text or back, so a token without text at the end of either is a separate piece. */
function piecesOf(response, count) {
  const { text } = response;
  const borders = new Set([...(response.turns ?? []), ...(response.contexts ?? [])].flatMap(([first, stop]) => [first, stop]));
  if (!response.lengths) {
    const border = (i) => Math.round((i * text.length) / Math.max(1, count));
    const even = Array.from({ length: count }, (_, i) => ({ text: text.slice(border(i), border(i + 1)), from: i, to: i + 1, start: border(i) }));
    return even.filter((piece) => piece.text);
  }
  const pieces = [];
  let [start, from] = [0, 0];
  const close = (stop) => {
    for (; from < stop; from += 1) pieces.push({ text: "", from, to: from + 1, start });
  };
  response.lengths.forEach((length, i) => {
    if (borders.has(i)) close(i);
    if (!length) return;
    pieces.push({ text: text.slice(start, start + length), from, to: i + 1, start });
    start += length;
    from = i + 1;
  });
  // The remaining tokens have no text, such as the end token.
  close(response.lengths.length);
  return pieces;
}

function probabilityOf(response, piece) {
  const nats = response.nats.slice(piece.from, piece.to);
  return nats.includes(null) ? null : Math.exp(Math.min(...nats.map((value) => -value)) / 1000);
}

function clipOf(response, piece) {
  if (!response.clips) return null;
  const states = response.clips.slice(piece.from, piece.to);
  return [..."^vd"].find((state) => states.includes(state)) ?? states[0];
}

/** Returns the number of steps between the weights that sampled a token and this step. */
function ageAt(response, token) {
  return response.ages.findLast(([first]) => first <= token)[1];
}

/** Returns the age of a piece. If several tokens form one character, the last token counts, because it has the text. */
const ageOf = (response, piece) => ageAt(response, piece.to - 1);

/** Returns whether earlier weights sampled a part of a response. */
const isOlder = (response) => response.ages[0][1] > 0;

/** Returns the index of the turn that contains a token, -1 if the environment appended the token, or null if there are no turns. */
function turnAt(response, token) {
  return response.turns ? response.turns.findIndex(([first, stop]) => first <= token && token < stop) : null;
}

/** Returns the index of the new context of an episode that contains a token, or -1. */
function contextAt(response, token) {
  return response.contexts?.findIndex(([first, stop]) => first <= token && token < stop) ?? -1;
}

/** Returns the parts of an episode in order: its turns, and the environment's text before each turn. {turn, context, from, to} has piece indices. */
function partsOf(response, pieces) {
  const parts = [];
  pieces.forEach((piece, place) => {
    const [turn, context] = [turnAt(response, piece.from), contextAt(response, piece.from)];
    const last = parts.at(-1);
    if (last && last.turn === turn && last.context === context) last.to = place + 1;
    else parts.push({ turn, context, from: place, to: place + 1 });
  });
  return parts;
}

/** Returns a function from a part to the number of its pieces that are shown at first. */
function shares(parts) {
  const turns = parts.filter((part) => part.turn >= 0).length;
  const { tokens, turn, environment, least } = EPISODE;
  const ofTurn = Math.max(turn, Math.floor(tokens / Math.max(1, turns)));
  const ofOther = Math.max(least, Math.min(environment, Math.floor(tokens / parts.length)));
  return (part) => (part.turn >= 0 ? ofTurn : ofOther);
}

/** Returns the CSS class for the shade of a piece. p0 is the least probable. Tokens outside the loss are shaded as the environment's. */
function shadeOf(response, piece, shading) {
  const turn = turnAt(response, piece.from);
  if (turn === -1 || response.forgotten?.includes(turn)) return "environment";
  if (shading === "probability") {
    const probability = probabilityOf(response, piece);
    if (probability === null) return "unknown";
    const bin = PROBABILITIES.findIndex((limit) => probability < limit);
    return `p${bin < 0 ? PROBABILITIES.length : bin}`;
  }
  if (shading === "clip") return CLIPS[clipOf(response, piece) ?? "-"][0];
  if (shading === "age") {
    const age = ageOf(response, piece);
    const bin = AGES.findIndex((limit) => age <= limit);
    return `a${bin < 0 ? AGES.length : bin}`;
  }
  return "plain";
}

/** Returns a function that tests whether a piece overlaps with an occurrence of `words` (lower case). */
function hitsOf(text, words) {
  const hits = [];
  if (!words) return () => false;
  const lower = text.toLowerCase();
  for (let at = lower.indexOf(words); at >= 0; at = lower.indexOf(words, at + words.length)) hits.push([at, at + words.length]);
  return (piece) => hits.some(([from, to]) => piece.start < to && piece.start + piece.text.length > from);
}

/** Returns the nodes of a response that was logged at `step`. */
function showTokens(response, count, { shading, words, hint, step }) {
  const pieces = piecesOf(response, count);
  const hit = hitsOf(response.text, words);
  const graded = response.graded ?? Infinity;
  const body = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `Response of ${counted(count, "token")}; arrow keys move between tokens` });
  /** Returns a label with the step of the weights if they differ from the weights of the previous piece. */
  const change = (piece, place) => {
    if (shading !== "age" || !isOlder(response)) return null;
    const age = ageOf(response, piece);
    if (place && age === ageOf(response, pieces[place - 1])) return null;
    return el("small", { class: "since" }, `step ${step - age}`);
  };
  const node = (place) => {
    const piece = pieces[place];
    const kinds = ["token", shadeOf(response, piece, shading)];
    if (hit(piece)) kinds.push("hit");
    if (piece.start >= graded) kinds.push("ungraded");
    if (/\n$/.test(piece.text)) kinds.push("newline");
    if (!piece.text) kinds.push("end");
    return el("span", { class: kinds.join(" "), "data-place": place }, change(piece, place), piece.text || (turnAt(response, piece.from) === -1 ? "special" : "end"));
  };
  const nodes = (from, to) => Array.from({ length: to - from }, (_, i) => node(from + i));

  let at = null;
  const show = (span) => {
    at?.classList.remove("at");
    at = span ?? null;
    at?.classList.add("at");
    hint.show(at, at && describe(response, pieces[at.dataset.place], step));
  };
  body.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".token");
    if (span) show(span);
  });
  body.addEventListener("pointerleave", () => show(null));
  body.addEventListener("blur", () => show(null));
  body.addEventListener("keydown", (event) => {
    const spans = [...body.querySelectorAll(".token")];
    const place = spans.indexOf(at);
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || !spans.length) return;
    event.preventDefault();
    show(spans[Math.min(spans.length - 1, Math.max(0, to))]);
  });
  /** Returns a button that is replaced by the hidden tokens. */
  const more = (hidden, fill) => {
    const button = el("button", { type: "button", class: "more" }, `Show ${counted(hidden, "more token")}`);
    button.addEventListener("click", () => {
      fill();
      button.remove();
      body.focus();
    });
    return button;
  };
  if (!pieces.length) body.append(el("span", { class: "none" }, "(no tokens)"));
  if (response.turns) {
    const parts = partsOf(response, pieces);
    const share = shares(parts);
    body.classList.add("episode");
    body.append(...parts.map((part) => partNode(response, part, { nodes, more, share: share(part) })));
    return [body];
  }
  body.append(...nodes(0, Math.min(pieces.length, TOKENS_AT_FIRST)));
  const hidden = pieces.length - TOKENS_AT_FIRST;
  return hidden > 0 ? [body, more(hidden, () => body.append(...nodes(TOKENS_AT_FIRST, pieces.length)))] : [body];
}

/** Returns a part of an episode with its name. At first, the middle of a long part is hidden, and `share` pieces are shown. */
function partNode(response, { turn, context, from, to }, { nodes, more, share }) {
  const size = to - from;
  const whole = size <= share * (1 + NOT_WORTH_HIDING);
  const [head, tail] = [from + Math.ceil((share * 2) / 3), to - Math.floor(share / 3)];
  const kind = turn >= 0 ? "turn" : context >= 0 ? "environment context" : "environment";
  const inside = whole ? nodes(from, to) : nodes(from, head);
  if (!whole) {
    const button = more(tail - head, () => button.replaceWith(...nodes(head, tail)));
    inside.push(button, ...nodes(tail, to));
  }
  return el("div", { class: `part ${kind}` }, nameOf(response, turn, context), el("div", { class: "said" }, ...inside));
}

/** Returns the name of a part: the turn and its reward, or the environment and the context that it replaces, if any. */
function nameOf(response, turn, context) {
  if (turn < 0) {
    const replaced = context < 0 ? null : response.contexts[context][0] ? "all before" : "the prompt";
    return el("small", { class: "since" }, replaced ? `new context, in place of ${replaced}` : "environment");
  }
  const reward = response.turns[turn][2];
  const named = `turn ${turn + 1}${response.forgotten?.includes(turn) ? ", outside the loss" : ""}`;
  if (reward === null) return el("small", { class: "since" }, named);
  return el("small", { class: "since" }, `${named}, reward `, el("b", { class: reward > 0 ? "good" : reward < 0 ? "bad" : "" }, signed(reward)));
}

/** Returns the lines of the hint for a piece. */
function describe(response, piece, step) {
  const lines = [];
  const whole = response.lengths ? "" : " (boundaries unknown)";
  lines.push(piece.to - piece.from > 1 ? `tokens ${piece.from + 1} to ${piece.to}, one character` : `token ${piece.from + 1}${whole}`);
  const turn = turnAt(response, piece.from);
  if (turn === -1) return [...lines, contextAt(response, piece.from) < 0 ? "appended by the environment" : "of a new context of the environment"];
  if (turn !== null) lines.push(`turn ${turn + 1} of ${response.turns.length}`);
  for (let i = piece.from; i < piece.to; i += 1) {
    const nats = response.nats[i];
    const probability = nats === undefined || nats === null ? "not recorded" : shownProbability(Math.exp(-nats / 1000));
    lines.push(`probability ${probability}`);
    const ratio = response.ratios?.[i];
    const state = response.clips?.[i];
    if (ratio !== undefined && ratio !== null) lines.push(`ratio ${(ratio / 10000).toFixed(3)}${state ? `, ${CLIPS[state][1]}` : ""}`);
    lines.push(`sampled by the weights of ${ofStep(step, ageAt(response, i))}`);
  }
  if (piece.start >= (response.graded ?? Infinity)) lines.push("the stop string, which the grader does not see");
  return lines;
}

/** Returns the step whose initial weights sampled a token. */
function ofStep(step, age) {
  return age ? `step ${step - age}, ${counted(age, "step")} before` : "this step";
}

/** Returns the steps whose weights sampled a response, or null if only this step's weights did. */
function drawnBy(response, step) {
  if (!isOlder(response)) return null;
  const [[, oldest], newest] = [response.ages[0], response.ages.at(-1)[1]];
  if (response.ages.length === 1) return `the weights of ${ofStep(step, oldest)}`;
  return `${response.ages.length} versions of the weights, steps ${step - oldest} to ${step - newest}`;
}

function shownProbability(value) {
  return value < 0.0001 ? value.toExponential(1).replace("e-", `e${MINUS}`) : value.toPrecision(3);
}

/** A hint, which is shown below or above its token. */
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
