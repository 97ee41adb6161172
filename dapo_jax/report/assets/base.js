// Shared by all other files: creates elements, formats numbers, sets the theme, and reads data from inert script elements.

const RUN_COLOURS = 8;

/** Returns an element with attributes and children. Text children become text nodes, so they are never parsed as markup. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Returns the colour of run or series `number`, as a custom property that the theme defines. */
function colour(number) {
  return `var(--run-${number % RUN_COLOURS})`;
}

function swatch(number) {
  const node = el("span", { class: "swatch", "aria-hidden": "true" });
  node.style.setProperty("--c", colour(number));
  return node;
}

const MINUS = "\u2212";

/** Formats a number briefly, with three or four digits. The limits are where rounding reaches the next unit. */
function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (size < 1e-3 || size >= 999.5e9) text = shortPower(size.toExponential(1));
  else if (size >= 999.5e6) text = `${(size / 1e9).toPrecision(3)}G`;
  else if (size >= 999.5e3) text = `${(size / 1e6).toPrecision(3)}M`;
  else if (size >= 99999.5) text = `${(size / 1e3).toFixed(0)}k`;
  else if (Number.isInteger(size)) text = size.toLocaleString("en-US");
  else if (size >= 999.5) text = Math.round(size).toLocaleString("en-US");
  else text = size.toPrecision(3);
  return value < 0 ? MINUS + text : text;
}

/** Shortens the exponent of a number's text. */
const shortPower = (text) => text.replace("e+", "e").replace("e-", `e${MINUS}`);

function percent(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(100 * value);
  return `${size > 0 && size < 0.995 ? Number((100 * value).toPrecision(2)) : (100 * value).toFixed(1)}%`;
}

function signed(value, digits = 2) {
  if (Number.isNaN(value)) return "–";
  return (value < 0 ? MINUS : "+") + Math.abs(value).toFixed(digits);
}

/** Formats a duration given in seconds. */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const [whole, minutes] = [Math.round(seconds), Math.round(seconds / 60)];
  if (whole < 120) return `${figure(seconds)} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Formats an ISO 8601 time to the minute. */
function moment(text) {
  return text ? `${text.slice(0, 16).replace("T", " ")} UTC` : "an unknown time";
}

function counted(count, word, plural = `${word}s`) {
  return `${count.toLocaleString("en-US")} ${count === 1 ? word : plural}`;
}

const readJson = (id) => JSON.parse(document.getElementById(id).textContent);

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** For a page from a server: parts that are newer than the page, and a function that requests missing parts. A page in a file is complete. */
const served = { newer: {}, packed: null };

/** Returns the decompressed content of a part of the page. */
async function unpack(name) {
  const text = served.newer[name] ?? document.getElementById(name)?.textContent;
  const stream = text === undefined ? await served.packed(name) : new Blob([bytesOf(text)]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("gzip")));
}

/** Lets the browser draw and handle events between two pieces of work. */
const breathe = () => new Promise((resolve) => setTimeout(resolve));

/** Offers a text to the reader as a file. */
function download(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}

/** The state of the page in its address, so that a link shows the same tab, step and group. */
const address = {
  get: () => Object.fromEntries(new URLSearchParams(location.hash.slice(1))),
  set(state) {
    const known = Object.entries(state).filter(([, value]) => value !== undefined);
    try {
      history.replaceState(null, "", `#${new URLSearchParams(known)}`);
    } catch {
      // A sandboxed frame has no address.
    }
  },
};

/** Stores the reader's choices for the next visit, which is not possible in a sandboxed frame. */
const memory = {
  get(key) {
    try {
      return localStorage.getItem(`dapo_jax.report.${key}`);
    } catch {
      return null;
    }
  },
  set(key, value) {
    try {
      localStorage.setItem(`dapo_jax.report.${key}`, value);
    } catch {
      // The choice is not stored.
    }
  },
};

/** Follows the system's theme until the reader presses the button. */
function startTheme(button) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = memory.get("theme");
  const show = () => {
    const dark = chosen === null ? system.matches : chosen === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${dark ? "light" : "dark"} theme`);
  };
  system.addEventListener("change", show);
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    memory.set("theme", chosen);
    show();
  });
  show();
}

/** Returns a row of buttons, one of which is pressed. `options` are [value, label, hint?]. */
function segmented(label, options, value, chosen) {
  const buttons = options.map(([option, text, hint]) =>
    el(
      "button",
      {
        type: "button",
        "aria-pressed": String(option === value),
        "data-value": option,
        title: hint,
        onclick: () => {
          for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.value === option));
          chosen(option);
        },
      },
      text,
    ),
  );
  return el("div", { class: "segmented", role: "group", "aria-label": label }, ...buttons);
}

/** Returns a select element with a label. `options` are [value, label]. */
function select(label, options, value, chosen) {
  const box = el("select", { onchange: () => chosen(box.value) });
  box.append(...options.map(([option, text]) => el("option", { value: option, selected: option === value }, text)));
  return el("label", { class: "field" }, el("span", {}, label), box);
}
