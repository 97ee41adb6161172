// A page that is served: asks now and then whether there is more, and takes it in without losing its reader's place.

const ASK_MS = 2000;
const ENDED = "The command that serves this page has ended: it shows what was read last.";

/** The answer of the page's own server; null if nobody answers any more. */
async function asked(path) {
  const answer = await fetch(path).catch(() => null);
  if (answer && !answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer;
}

served.packed = async (name) => {
  const answer = await asked(`packed/${name}`);
  if (!answer) throw new Error(ENDED);
  return answer.body;
};

/** Calls `update` with newer data whenever there are some; `version` is of the data that are shown, `node` says how it stands. */
async function watch(node, version, update) {
  const tell = (words, kind) => {
    if (node.textContent !== words) node.textContent = words;
    node.className = `made watching ${kind}`;
  };
  for (;;) {
    const state = await asked("state").then((answer) => answer?.json());
    const newer = state && state.version !== version ? await asked("data").then((answer) => answer?.json()) : null;
    if (newer) {
      served.newer = newer.packed;
      version = newer.watched;
      await update(newer);
    }
    if (!state) tell(ENDED, "broken");
    else if (state.error) tell(state.error, "broken");
    else tell(`kept current · ${new Date().toLocaleTimeString()}`, "");
    await new Promise((resolve) => setTimeout(resolve, ASK_MS));
  }
}
