// Updates a page from a server: polls for new data, and keeps the reader's position.

const ASK_MS = 2000;
const ENDED = "The command that serves this page has ended. The page shows the last data that it received.";

/** Returns the response of the page's own server, or null if the server does not respond. */
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

/** Calls `update` whenever there is newer data. `version` is the version of the data that is shown, and `node` displays the status. */
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
