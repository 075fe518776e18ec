// Asks for the state once a second while the page is visible, and hands it to the parts of the page.

import { call, key } from "./api.js";
import { setModels, startChat } from "./chat.js";
import { showCluster } from "./cluster.js";
import { byId, setText } from "./dom.js";
import { showRequest, showRequests, startRequests } from "./requests.js";
import { refreshUsage } from "./usage.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 10000;
let timer = 0;
let askedForKey = false;
let hadState = false;

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const response = await call("/ui/state", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    show(await response.json());
    if (!hadState) refreshUsage();
    hadState = true;
  } catch (error) {
    failed(error);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, INTERVAL_MS);
}

function show(state) {
  setText(byId("model"), state.models.join(", "));
  setModels(state.models);
  setText(byId("status"), state.has_controller ? "Connected" : "The controller does not answer; this is what the gateway sees");
  byId("status").className = state.has_controller ? "" : "bad";
  showRequests(state.requests, state.now);
  showCluster(state);
}

function failed(error) {
  byId("status").className = "bad";
  if (error.status === 401) {
    setText(byId("status"), key.get() ? "The key is not valid" : "An API key is needed");
    if (!askedForKey) openKey();
    askedForKey = true;
  } else {
    setText(byId("status"), error.status ? error.message : "No answer from the gateway; what is shown may be old");
  }
}

function openKey() {
  byId("key-value").value = "";
  byId("key").showModal();
}

function useKey(value) {
  key.set(value.trim());
  setText(byId("status"), "Connecting");
  hadState = false;
  poll();
}

byId("key-open").addEventListener("click", openKey);
byId("key-form").addEventListener("submit", () => useKey(byId("key-value").value));
byId("key-forget").addEventListener("click", () => {
  byId("key").close();
  useKey("");
});
document.addEventListener("visibilitychange", () => {
  hadState = false;
  poll();
});
startChat(showRequest);
startRequests();
poll();
