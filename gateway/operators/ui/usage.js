// What keys used by day: of all keys for an admin, else of this tab's key. Asked for less often than the state.

import { call, json } from "./api.js";
import { byId, el, table } from "./dom.js";

const INTERVAL_MS = 30000;
let timer = 0;

export async function refreshUsage() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const response = await call("/ui/usage", { signal: AbortSignal.timeout(10000) });
    show(await json(response));
  } catch (error) {
    if (error.status) byId("usage-section").hidden = true; // without an answer, the page says that nothing is new
  }
  clearTimeout(timer);
  timer = setTimeout(refreshUsage, INTERVAL_MS);
}

function show(usage) {
  byId("usage-section").hidden = usage.data === null;
  if (usage.data === null) return;
  const columns = ["Day (UTC)", "key", "model", "requests>", "failed>", "prompt>", "cached>", "output>"];
  const count = (value) => value.toLocaleString("en");
  const rows = usage.data.map((row) => ({
    cells: [
      row.date, row.key || "(no key)", row.model, count(row.num_requests), count(row.num_failed),
      count(row.prompt_tokens), count(row.cached_tokens), count(row.completion_tokens),
    ],
  }));
  const shown = rows.length ? table(columns, rows, "Usage by day, key and model") : el("p", { class: "empty" }, "Nothing was used yet.");
  const more = usage.has_more ? el("p", { class: "legend" }, "The latest lines only; “disagg usage” has all.") : "";
  byId("usage").replaceChildren(shown, more);
}
