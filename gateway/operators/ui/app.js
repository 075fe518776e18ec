// Asks for the state once a second while the page is visible, and hands it to the parts of the page. What is shown is
// marked as old while there is no answer.

import { call, json, key } from "./api.js";
import { addSamples, forgetSamples, lastSampleAt, showCharts } from "./charts.js";
import { setModels, startChat } from "./chat.js";
import { showCluster } from "./cluster.js";
import { byId, clock, setText } from "./dom.js";
import { followHash, linkTo, refreshRequest, showRequests, startRequests, wantedRequests } from "./requests.js";
import { refreshUsage } from "./usage.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 10000;
const OLD_MS = 5000;
let timer = 0;
let asking = null; // what aborts the call under way; a newer one takes its place
let askedForKey = false;
let hadState = false;
let updatedAt = 0; // of the gateway's clock, in seconds since the epoch; 0 before the first state
let waitingSince = performance.now();
let problem = "";

async function poll() {
  clearTimeout(timer);
  asking?.abort();
  asking = null;
  if (document.hidden) return;
  const own = (asking = new AbortController());
  try {
    const query = new URLSearchParams({ after: lastSampleAt(), ...wantedRequests() });
    const signal = AbortSignal.any([own.signal, AbortSignal.timeout(TIMEOUT_MS)]);
    const state = await json(await call(`/ui/state?${query}`, { signal }));
    if (own !== asking) return;
    show(state);
    refreshRequest();
    if (!hadState) refreshUsage();
    hadState = true;
  } catch (error) {
    if (own !== asking) return;
    failed(error);
  }
  timer = setTimeout(poll, INTERVAL_MS);
}

function show(state) {
  [updatedAt, waitingSince, problem] = [state.now, performance.now(), ""];
  setText(byId("model"), state.models.join(", "));
  setModels(state.models);
  setText(byId("status"), state.has_controller ? "Connected" : "The controller does not answer; this is what the gateway sees");
  byId("status").className = state.has_controller ? "" : "bad";
  addSamples(state);
  showRequests(state);
  showCluster(state);
  showCharts(state);
  showAge();
}

function failed(error) {
  problem = error.message;
  if (error.status === 401) {
    problem = key.get() ? "The key is not valid" : "An API key is needed";
    if (!askedForKey) openKey();
    askedForKey = true;
  }
  byId("status").className = "bad";
  setText(byId("status"), problem);
  showAge();
}

// The values are old after a failure, and also while an answer is awaited for too long.
function showAge() {
  const isOld = problem !== "" || performance.now() - waitingSince > OLD_MS;
  const since = updatedAt ? `Not updated since ${clock(updatedAt)}` : "Nothing is known yet";
  const text = isOld ? `${since}: ${problem || "the gateway is slow to answer"}` : "";
  for (const banner of document.querySelectorAll(".banner")) {
    setText(banner, text);
    banner.hidden = !isOld;
  }
  document.body.classList.toggle("old", isOld);
  document.title = isOld ? "disagg (not updated)" : "disagg";
}

function openKey() {
  byId("key-value").value = "";
  byId("key").showModal();
}

function useKey(value) {
  key.set(value.trim());
  setText(byId("status"), "Connecting");
  hadState = false;
  forgetSamples(); // the other key may see less
  poll();
  followHash();
}

byId("key-open").addEventListener("click", openKey);
byId("key-form").addEventListener("submit", () => useKey(byId("key-value").value));
byId("key-forget").addEventListener("click", () => {
  byId("key").close();
  useKey("");
});
document.addEventListener("visibilitychange", () => {
  hadState = false;
  waitingSince = performance.now();
  poll();
});
setInterval(() => document.hidden || showAge(), INTERVAL_MS);
startChat(linkTo);
startRequests(poll);
poll();
