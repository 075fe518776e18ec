// The latest requests, and one of them as `disagg explain` has it.

import { call } from "./api.js";
import { ago, byId, bytes, el, milliseconds, table } from "./dom.js";

const PARTS = ["wait", "prefill", "transfer", "decode", "delay", "barrier"];
let shown = "";

export function startRequests() {
  byId("detail-close").addEventListener("click", () => byId("detail").close());
  byId("requests").addEventListener("click", (event) => {
    const id = event.target.closest?.("button[data-id]")?.dataset.id;
    if (id) showRequest(id);
  });
}

export function showRequests(requests, now) {
  const root = byId("requests");
  if (requests === null) {
    draw(root, "denied", () => el("p", { class: "empty" }, "Requests of all tenants need the key of an admin. “How it ran” explains an answer of this chat."));
  } else if (!requests.length) {
    draw(root, "none", () => el("p", { class: "empty" }, "There was no request yet."));
  } else {
    const focused = document.activeElement?.dataset?.id;
    draw(root, JSON.stringify(requests) + Math.floor(now), () => listing(requests, now));
    if (focused) [...root.querySelectorAll("button")].find((button) => button.dataset.id === focused)?.focus();
  }
}

function draw(root, what, make) {
  if (shown === what) return;
  shown = what;
  root.replaceChildren(make());
}

function listing(requests, now) {
  const columns = ["Request", "ago>", "outcome", "prefill", "decode", "prompt>", "output>", "KV moved>", "TTFT ms>", "total ms>"];
  const rows = requests.map((request) => {
    const name = request.id.length > 14 ? `${request.id.slice(0, 12)}…` : request.id;
    const open = el("button", { type: "button", class: "link mono", "data-id": request.id, "aria-label": `Explain request ${request.id}` }, name);
    return {
      cells: [
        open, ago(now - request.arrived_at), outcome(request.outcome, request.is_probe), request.prefill || "–", request.decode || "–",
        String(request.prompt_tokens), String(request.completion_tokens), request.kv_bytes ? bytes(request.kv_bytes) : "–",
        milliseconds(request.ttft_ms), milliseconds(request.total_ms),
      ],
    };
  });
  return table(columns, rows, "Latest requests");
}

function outcome(text, isProbe) {
  const className = ["stop", "length"].includes(text) ? "good" : ["", "running", "cancelled"].includes(text) ? "muted" : "bad";
  return el("span", { class: className }, (text || "running") + (isProbe ? " (probe)" : ""));
}

export async function showRequest(id) {
  const [dialog, body] = [byId("detail"), byId("detail-body")];
  body.replaceChildren(el("p", { class: "empty" }, "Loading"));
  if (!dialog.open) dialog.showModal();
  try {
    const response = await call(`/ui/requests/${encodeURIComponent(id)}`);
    body.replaceChildren(...report(await response.json()));
  } catch (error) {
    body.replaceChildren(el("p", { class: "bad" }, error.message));
  }
}

function report(request) {
  const parts = [factsOf(request)];
  if (request.spans.length) parts.push(el("h3", {}, "Where the time went"), waterfall(request.spans));
  const options = request.options.length ? request.options : request.chosen ? [request.chosen] : [];
  if (options.length) parts.push(el("h3", {}, "Why there"), decision(request, options));
  else if (request.policy) parts.push(el("h3", {}, "Why there"), el("p", { class: "empty" }, "Shown to keys with the scope metrics or admin."));
  return parts;
}

function factsOf(request) {
  const route = [request.prefill_worker && `${request.prefill_worker} (prefill)`, request.decode_worker && `${request.decode_worker} (decode)`];
  const cached = [[request.prefill_worker, request.prefill_cached_tokens], [request.decode_worker, request.decode_cached_tokens]];
  const entries = [
    ["request", el("code", {}, request.request_id)],
    ["outcome", outcome(request.outcome, request.is_probe)],
    ["ran on", route.filter(Boolean).join(" to ") || (request.outcome ? "no worker" : "no worker yet")],
    ["tokens", `${request.prompt_tokens} of the prompt, ${request.completion_tokens} generated`],
    ["cached", cached.filter(([worker, count]) => worker && count).map(([worker, count]) => `${count} tokens on ${worker}`).join(", ") || "nothing"],
    ["KV moved", request.transport ? `${bytes(request.kv_bytes)} by ${request.transport}` : "none"],
    ["attempts", request.attempts > 1 ? String(request.attempts) : ""],
    ["longest gap", request.max_itl_ms ? `${milliseconds(request.max_itl_ms)} ms between two tokens` : ""],
    ["guardrails", request.guardrails.map((made) => `${made.guardrail}: ${made.action} (${made.subject})${made.reason && `, ${made.reason}`}`).join("; ")],
    ["traceparent", request.trace_parent && el("code", {}, request.trace_parent)],
  ];
  const shownEntries = entries.filter(([, value]) => value);
  return el("dl", { class: "facts" }, ...shownEntries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
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
