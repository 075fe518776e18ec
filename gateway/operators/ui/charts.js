// What clients get, over time. The gateway keeps the samples; the page asks for those that it does not have.

import { byId, clock, el, facts, percent, rate, short, svg } from "./dom.js";

const LENGTH = 300; // seconds, as in gateway/operators/history.py
const STRIP = 60;
const [HEIGHT, TOP, BOTTOM] = [92, 5.5, 86.5]; // the lines are at the middle of the numbers beside them
const LOAD_LEFT_OUT = "Shown to keys with the scope metrics or admin.";
const TARGETS = { both: "all", ttft: "TTFT", tpot: "TPOT" };

let samples = []; // of one second each, the oldest first

export function lastSampleAt() {
  return samples.at(-1)?.at ?? 0;
}

export function forgetSamples() {
  samples = [];
}

export function addSamples(state) {
  if (lastSampleAt() > state.now + LENGTH) samples = []; // the gateway's clock was set back
  samples.push(...state.history.filter((sample) => sample.at > lastSampleAt()));
  samples = samples.filter((sample) => sample.at > state.now - LENGTH);
  const last = samples.at(-1);
  // The gateway keeps no history of each worker where there are many.
  if (last && state.has_load) last.kv ??= Object.fromEntries(state.workers.map((worker) => [worker.id, 100 * used(worker)]));
  for (const sample of samples) if (sample.at <= state.now - STRIP) delete sample.kv;
}

export function used(worker) {
  return worker.blocks ? (worker.active + worker.reserved) / worker.blocks : 0;
}

export function showCharts(state) {
  const names = Object.keys(TARGETS).filter((name) => state.targets[name]?.[1]);
  const now = names.map((name, i) => [keyed(i, TARGETS[name]), percent(state.targets[name][0] / state.targets[name][1])]);
  facts(byId("targets-now"), now);
  facts(byId("requests-now"), state.has_load ? [["now", `${rate(state.requests_per_s)} req/s`]] : []);
  facts(byId("tokens-now"), state.has_load ? [["now", `${rate(state.output_tokens_per_s)} tok/s`]] : []);
  if (!state.has_load) {
    for (const name of ["targets", "requests-rate", "tokens-rate"]) byId(name).replaceChildren(el("p", { class: "empty" }, LOAD_LEFT_OUT));
    return;
  }
  const right = Math.floor(state.now);
  const shares = Object.keys(TARGETS).map((name) => pointsOf((sample) => sample.targets[name]));
  if (shares.some((points) => points.some(([, value]) => value !== undefined))) {
    const shown = shares.filter((_, i) => !names.length || names.includes(Object.keys(TARGETS)[i]));
    draw(byId("targets"), "Targets met", shown, { right, top: 1, label: (value) => `${value * 100} %`, note: "of the last minute" });
  } else {
    byId("targets").replaceChildren(el("p", { class: "empty" }, "No request of the last 5 minutes had a latency target."));
  }
  const rates = [["requests-rate", "Requests per second", "requests_per_s", "req/s", 1], ["tokens-rate", "Output tokens per second", "output_tokens_per_s", "tok/s", 10]];
  for (const [id, name, field, unit, least] of rates) {
    const points = pointsOf((sample) => sample[field]);
    const top = roundUp(Math.max(least, ...points.map(([, value]) => value)));
    draw(byId(id), name, [points], { right, top, label: (value) => `${short(value)} ${unit}`, note: "" });
  }
}

function pointsOf(valueOf) {
  return samples.map((sample) => [sample.at, valueOf(sample)]);
}

function keyed(i, text) {
  return el("span", {}, el("i", { class: `k${i}` }), text);
}

// The least of 1, 2, 5, 10, 20, ... that is not less.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value * (1 - 1e-9));
}

function draw(root, name, series, { right, top, label, note }) {
  const height = (value) => (BOTTOM - (value / top) * (BOTTOM - TOP)).toFixed(2);
  const path = (points, i) => {
    let before = -Infinity;
    const parts = points.filter(([, value]) => value !== undefined).map(([at, value]) => {
      const command = at - before > 2 ? "M" : "L"; // a line does not bridge what is not known
      before = at;
      return `${command}${LENGTH - (right - at)} ${height(value)}${command === "M" ? "h.01" : ""}`;
    });
    return svg("path", { d: parts.join(""), class: `c${i}` });
  };
  const marks = [1, 0.5, 0].map((share) => share * top);
  const lines = marks.map((value) => svg("line", { x1: 0, x2: LENGTH, y1: height(value), y2: height(value) }));
  const drawn = svg("svg", { viewBox: `0 0 ${LENGTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...lines, ...series.map(path).reverse());
  const values = series[0].map(([, value]) => value).filter((value) => value !== undefined);
  const exact = (value) => label(Number(value.toPrecision(3)));
  const about = values.length ? `: last ${exact(values.at(-1))}, least ${exact(Math.min(...values))}, most ${exact(Math.max(...values))}` : "";
  root.replaceChildren(
    el("div", { class: "plot", role: "img", "aria-label": `${name}, ${clock(right - LENGTH)} to ${clock(right)}${about}` },
      el("div", { class: "y" }, ...marks.map((value) => el("span", {}, label(value)))), drawn),
    el("div", { class: "axis" }, el("span", {}, clock(right - LENGTH)), el("span", {}, note), el("span", {}, clock(right))),
  );
}

// The KV in use of a worker in the last minute: darker is more.
export function drawStrip(canvas, workerId, now) {
  const context = canvas.getContext("2d");
  const width = canvas.width / STRIP;
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = getComputedStyle(canvas).getPropertyValue("--active");
  for (const { at, kv } of samples) {
    const share = (kv?.[workerId] ?? 0) / 100;
    if (!share) continue;
    context.globalAlpha = 0.15 + 0.85 * Math.min(1, share);
    context.fillRect((STRIP - 1 - (Math.floor(now) - at)) * width, 0, width, canvas.height);
  }
}
