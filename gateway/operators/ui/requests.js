// The latest requests, which a filter narrows down, and one of them as `disagg explain` has it.
//
// The part of the address after "#" has both, so that it can be kept and sent: #state=refused&request=ID

import { call, json } from "./api.js";
import { ago, byId, bytes, clock, el, milliseconds, row, setOptions, setText, table } from "./dom.js";

const PARTS = ["wait", "prefill", "transfer", "decode", "delay", "barrier"];
const FIELDS = ["id", "model", "state", "worker"];
const TYPING_MS = 200;
const TIMEOUT_MS = 10000;
const COLUMNS = ["Request", "ago>", "outcome", "model", "prefill", "decode", "prompt>", "output>", "KV moved>", "TTFT ms>", "total ms>"];

let lines = new Map(); // by request id
let tbody = null;
let explained = null; // the request in the dialog: {id, isFinal, hasReport}

// ---------------------------------------------------------------- the address

function place() {
  const hash = location.hash.slice(1);
  return new URLSearchParams(hash.includes("=") ? hash : "");
}

function placeWith(changes) {
  const found = place();
  for (const [name, value] of Object.entries(changes)) value ? found.set(name, value) : found.delete(name);
  const hash = found.toString();
  return hash ? `#${hash}` : location.pathname;
}

export function linkTo(id) {
  return `#${new URLSearchParams({ request: id })}`;
}

// The filter, as the gateway takes it.
export function wantedRequests() {
  const found = place();
  return Object.fromEntries(FIELDS.filter((name) => found.get(name)).map((name) => [name, found.get(name)]));
}

// Shows what the address says.
export function followHash() {
  const found = place();
  for (const name of FIELDS) setField(byId(`filter-${name}`), found.get(name) ?? "");
  const id = found.get("request");
  if (id) showRequest(id);
  else if (byId("detail").open) byId("detail").close();
}

function setField(field, value) {
  if (field.localName === "select" && ![...field.options].some((option) => option.value === value)) field.append(el("option", { value }, value));
  if (field.value !== value) field.value = value;
}

export function startRequests(refresh) {
  let typing = 0;
  const apply = () => {
    clearTimeout(typing);
    const values = FIELDS.map((name) => [name, byId(`filter-${name}`).value.trim()]);
    history.replaceState(null, "", placeWith(Object.fromEntries(values)));
    refresh();
  };
  byId("filter").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(apply, TYPING_MS);
  });
  byId("filter").addEventListener("change", apply);
  byId("filter").addEventListener("submit", (event) => {
    event.preventDefault();
    apply();
  });
  byId("filter-clear").addEventListener("click", () => {
    FIELDS.forEach((name) => (byId(`filter-${name}`).value = ""));
    apply();
  });
  // A link keeps the filter beside the request, and opens it also where the address has it already.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#request=']");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.pushState(null, "", placeWith({ request: new URLSearchParams(link.hash.slice(1)).get("request") }));
    followHash();
  });
  byId("detail-close").addEventListener("click", () => byId("detail").close());
  byId("detail").addEventListener("close", () => {
    if (byId("detail").open) return; // another request was asked for before this event came
    explained = null;
    if (place().has("request")) history.pushState(null, "", placeWith({ request: "" }));
  });
  const follow = () => {
    followHash();
    refresh();
  };
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  followHash();
}

// ---------------------------------------------------------------- the list

export function showRequests(state) {
  const { requests, now } = state;
  const wanted = wantedRequests();
  byId("filter").hidden = requests === null;
  setOptions(byId("filter-model"), [...new Set(["", ...state.models, wanted.model ?? ""])].map((name) => [name, name || "all"]));
  setField(byId("filter-model"), wanted.model ?? "");
  setOptions(byId("workers"), state.workers.map((worker) => [worker.id, ""]));
  if (requests === null) {
    empty("Requests of all tenants need the key of an admin. “How it ran” explains an answer of this chat.");
    setText(byId("found"), "");
    return;
  }
  const isFiltered = Object.keys(wanted).length > 0;
  setText(byId("found"), counted(requests.length, state.num_matching, state.num_searched, isFiltered));
  if (requests.length) list(requests, now);
  else empty(isFiltered ? "No request matches." : "This gateway had no request yet.");
}

function counted(numShown, numMatching, numSearched, isFiltered) {
  const shown = numShown < numMatching ? `${numShown} of ${numMatching}` : `${numMatching}`;
  return isFiltered ? `${shown} that match, among the latest ${numSearched}` : shown;
}

function empty(text) {
  tbody = null;
  lines = new Map();
  if (byId("requests").textContent !== text) byId("requests").replaceChildren(el("p", { class: "empty" }, text));
}

// Lines that did not change stay as they are, and so do the focus and a selection in them.
function list(requests, now) {
  if (!tbody) {
    const made = table(COLUMNS, [], "Latest requests");
    byId("requests").replaceChildren(made);
    tbody = made.tBodies[0];
  }
  const focused = document.activeElement?.dataset?.id;
  const kept = new Map();
  for (const request of requests) {
    const what = JSON.stringify(request);
    const known = lines.get(request.id);
    const shown = known?.what === what ? known : { what, root: line(request) };
    setText(shown.root.cells[1], ago(now - request.arrived_at));
    kept.set(request.id, shown);
  }
  lines = kept;
  const roots = [...kept.values()].map((each) => each.root);
  if (roots.length !== tbody.rows.length || roots.some((root, i) => root !== tbody.rows[i])) {
    tbody.replaceChildren(...roots);
    if (focused) tbody.querySelector(`a[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
}

function line(request) {
  const name = request.id.length > 14 ? `${request.id.slice(0, 12)}…` : request.id;
  const open = el("a", { href: linkTo(request.id), class: "mono", "data-id": request.id, "aria-label": `Explain request ${request.id}` }, name);
  const reason = ["refused", "failed"].includes(request.state) && request.reason ? el("div", { class: "reason" }, request.reason) : null;
  const count = (number) => (request.state === "refused" && !number ? "–" : String(number));
  return row(COLUMNS, {
    cells: [
      open, "", el("div", {}, outcome(request.state, request.outcome, request.is_probe), reason), request.model, request.prefill || "–",
      request.decode || "–", count(request.prompt_tokens), count(request.completion_tokens), request.kv_bytes ? bytes(request.kv_bytes) : "–",
      milliseconds(request.ttft_ms), request.state === "refused" ? "–" : milliseconds(request.total_ms),
    ],
  });
}

function outcome(state, text, isProbe) {
  const className = { answered: "good", refused: "bad", failed: "bad" }[state] ?? "muted";
  const shown = state === "refused" ? `refused: ${text}` : state === "waiting" ? state : text;
  return el("span", { class: className }, shown + (isProbe ? " (probe)" : ""));
}

// ---------------------------------------------------------------- one request

// The same once more, while it may still change.
export function refreshRequest() {
  if (explained && !explained.isFinal) load(explained);
}

function showRequest(id) {
  if (explained?.id !== id) {
    explained = { id, isFinal: false, hasReport: false };
    byId("detail-body").replaceChildren(el("p", { class: "empty" }, "Loading"));
  }
  if (!byId("detail").open) byId("detail").showModal();
  load(explained);
}

async function load(own) {
  let shown;
  try {
    const request = await json(await call(`/ui/requests/${encodeURIComponent(own.id)}`, { signal: AbortSignal.timeout(TIMEOUT_MS) }));
    own.isFinal = request.outcome !== "running";
    own.hasReport = true;
    shown = report(request);
  } catch (error) {
    if (own.hasReport && !error.status) return; // a banner says that it is old
    own.isFinal = error.status === 404;
    shown = [el("p", { class: "bad" }, error.message)];
  }
  if (explained === own) byId("detail-body").replaceChildren(...shown);
}

function report(request) {
  const parts = [factsOf(request)];
  if (request.spans.length) parts.push(el("h3", {}, "Where the time went"), waterfall(request.spans));
  const options = request.options.length ? request.options : request.chosen ? [request.chosen] : [];
  if (options.length) parts.push(el("h3", {}, "Why there"), decision(request, options), ...(request.ways.length ? [waysOf(request.ways)] : []));
  else if (request.policy) parts.push(el("h3", {}, "Why there"), el("p", { class: "empty" }, "Shown to keys with the scope metrics or admin."));
  return parts;
}

function factsOf(request) {
  const route = [request.prefill_worker && `${request.prefill_worker} (prefill)`, request.decode_worker && `${request.decode_worker} (decode)`];
  const cached = [[request.prefill_worker, request.prefill_cached_tokens], [request.decode_worker, request.decode_cached_tokens]];
  const entries = [
    ["request", el("a", { href: linkTo(request.request_id), class: "mono" }, request.request_id)],
    ["arrived", clock(request.arrived_at)],
    ["outcome", outcome(stateOf(request), request.outcome, request.is_probe)],
    ["because", request.detail],
    ["model", request.model],
    ["ran on", route.filter(Boolean).join(" to ") || (request.outcome ? "no worker" : "no worker yet")],
    ["tokens", `${request.prompt_tokens} of the prompt, ${request.completion_tokens} generated`],
    ["drafts", request.drafted_tokens ? `${request.accepted_tokens} of ${request.drafted_tokens} accepted` : ""],
    ["cached", cached.filter(([worker, count]) => worker && count).map(([worker, count]) => `${count} tokens on ${worker}`).join(", ") || "nothing"],
    ["fetched", request.fetched ? fetchedOf(request.fetched) : ""],
    ["KV moved", request.transport ? `${bytes(request.kv_bytes)} by ${request.transport}` : "none"],
    ["attempts", request.attempts > 1 ? String(request.attempts) : ""],
    ["a trial", request.trial],
    ["longest gap", request.max_itl_ms ? `${milliseconds(request.max_itl_ms)} ms between two tokens` : ""],
    ["guardrails", request.guardrails.map((made) => `${made.guardrail}: ${made.action} (${made.subject})${made.reason && `, ${made.reason}`}`).join("; ")],
    ["traceparent", request.trace_parent && el("code", {}, request.trace_parent)],
  ];
  const shownEntries = entries.filter(([, value]) => value);
  return el("dl", { class: "facts" }, ...shownEntries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function fetchedOf({ source, outcome: ended, tokens, bytes: size, ms }) {
  const came = size ? `${tokens} tokens, ${bytes(size)} in ${milliseconds(ms)} ms, ` : "";
  return `${came}from ${source}${ended === "done" ? "" : `: ${ended}`}`;
}

function stateOf({ outcome: text, attempts }) {
  if (text === "running") return attempts ? "running" : "waiting";
  if (["stop", "length"].includes(text) || (text === "content_filter" && attempts)) return "answered";
  return text === "cancelled" ? "cancelled" : attempts ? "failed" : "refused";
}

function waterfall(spans) {
  const end = Math.max(...spans.map((span) => Math.max(span.end_ms ?? 0, span.start_ms)), 0.001);
  const rows = [...spans].sort((a, b) => a.start_ms - b.start_ms).map((span) => {
    const stop = span.end_ms ?? end;
    const bar = el("i", { class: span.stage.replace(/[^a-z_]/g, "") });
    bar.style.left = `${(span.start_ms / end) * 100}%`;
    bar.style.width = `${((stop - span.start_ms) / end) * 100}%`;
    const length = span.end_ms === undefined ? "lasts" : milliseconds(stop - span.start_ms);
    return { cells: [span.stage, span.worker || "gateway", milliseconds(span.start_ms), length, el("div", { class: "track" }, bar)] };
  });
  const made = table(["stage", "worker", "from ms>", "for ms>", ""], rows, "Stages of the request");
  made.querySelectorAll("td:last-child").forEach((cell) => cell.classList.add("wide"));
  return el("div", { class: "waterfall scroll" }, made);
}

function waysOf(ways) {
  const hasDelay = ways.some((way) => way.delay_ms);
  const columns = ["KV by", "tokens>", "get>", "compute>", ...(hasDelay ? ["delay>"] : []), ""];
  const rows = ways.map((way) => ({
    className: way.chosen ? "chosen" : "",
    cells: [
      way.source ? `${way.kind} ${way.source}` : way.kind, String(way.tokens), way.get_ms === undefined ? "not now" : milliseconds(way.get_ms),
      milliseconds(way.prefill_ms), ...(hasDelay ? [milliseconds(way.delay_ms)] : []), way.chosen ? "chosen" : "",
    ],
  }));
  return el("div", { class: "scroll" }, table(columns, rows, "Ways to the KV of the prompt"));
}

function decision(request, options) {
  const parts = PARTS.filter((part) => options.some((option) => option[`${part}_ms`]));
  const hasMisses = options.some((option) => option.missed_targets);
  const isChosen = (option) => request.chosen && option.prefill_worker === request.chosen.prefill_worker && option.decode_worker === request.chosen.decode_worker;
  const columns = ["prefill", "decode", "cost>", ...parts.map((part) => `${part}>`), "TTFT>", "TPOT>", ...(hasMisses ? ["misses>"] : []), ""];
  const rows = options.map((option) => ({
    className: isChosen(option) ? "chosen" : "",
    cells: [
      option.prefill_worker || "–", option.decode_worker, milliseconds(option.cost), ...parts.map((part) => milliseconds(option[`${part}_ms`])),
      milliseconds(option.ttft_ms), milliseconds(option.tpot_ms), ...(hasMisses ? [String(option.missed_targets)] : []), isChosen(option) ? "chosen" : "",
    ],
  }));
  const note = `policy ${request.policy}; milliseconds, as predicted at the placement${request.attempts > 1 ? " of the latest attempt" : ""}`;
  return el("div", {}, el("div", { class: "scroll" }, table(columns, rows, "Options of the placement")), el("p", { class: "legend" }, note));
}
