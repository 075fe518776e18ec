// The cluster: workers with their KV, and hand-overs between them.

import { drawStrip, used } from "./charts.js";
import { byId, bytes, el, facts, percent, rate, setText, svg, table } from "./dom.js";

const MAX_CARDS = 8; // of a column; more workers are drawn as cells of a heat map
const STRIP = 60;
const RECENT = 10; // seconds over which hand-overs are counted
const MAX_ARROWS = 12;
const MAX_ROWS = 8;
const LOAD_LEFT_OUT = "Shown to keys with the scope metrics or admin.";

const cards = new Map();
const past = [];
let shape = "";
let drawArrows = () => {};

new ResizeObserver(() => drawArrows()).observe(byId("map"));

export function showCluster(state) {
  const moved = movements(state);
  facts(byId("totals"), !state.has_load ? [["load", LOAD_LEFT_OUT]] : [
    ["queued", String(state.queued)],
    ["running", String(state.running)],
    ...["prefill", "transfer", "decode"].map((stage) => [`in ${stage}`, String(state.stages[stage] ?? 0)]),
  ]);
  showPools(state.pools);
  const columns = split(state.workers);
  build(columns, state);
  state.workers.forEach((worker) => showWorker(worker, state));
  drawArrows = () => showArrows(moved, columns);
  drawArrows();
  showPairs(moved, state.num_pairs);
}

function showPools(pools) {
  byId("pools").replaceChildren(...pools.map((pool) => {
    const className = pool.ready === pool.desired ? "good" : "warn";
    return el("li", {}, `${pool.name} `, el("b", { class: className }, `${pool.ready} of ${pool.desired}`));
  }));
}

// Prefill on the left, decode on the right; workers that do both are dealt out to both sides.
function split(workers) {
  const left = [];
  const right = [];
  let both = 0;
  for (const worker of workers) {
    const roles = worker.roles.length ? worker.roles : [worker.id.split("/").pop().split("-")[0]];
    if (roles.length > 1) (both++ % 2 ? right : left).push(worker);
    else (roles[0] === "prefill" ? left : right).push(worker);
  }
  const name = (list, other) => (both === workers.length && both ? "prefill and decode" : list.length ? other : "");
  return [{ title: name(left, "prefill"), workers: left }, { title: name(right, "decode"), workers: right }];
}

function build(columns, state) {
  const now = columns.map(({ workers }) => workers.map((worker) => worker.id).join()).join("|");
  if (now === shape && cards.size) return;
  shape = now;
  cards.clear();
  const made = columns.map(({ title, workers }) => {
    const isDense = workers.length > MAX_CARDS;
    const children = workers.map((worker) => {
      const card = isDense ? makeCell() : makeCard(worker);
      cards.set(worker.id, card);
      return card.root;
    });
    return el("div", { class: isDense ? "column dense" : "column" }, el("h3", {}, title ? `${title}, ${workers.length}` : ""), ...children);
  });
  byId("map").replaceChildren(...made, svg("svg", { class: "arrows", "aria-hidden": "true" }));
  if (state.num_workers > state.workers.length) {
    byId("map").append(el("p", { class: "muted" }, `${state.workers.length} of ${state.num_workers} workers are shown`));
  }
}

function makeCell() {
  const fill = el("i", {});
  return { root: el("div", { class: "cell", role: "img" }, fill), fill };
}

function makeCard(worker) {
  const parts = ["active", "reserved", "cached"].map((name) => el("i", { class: name }));
  const [phase, sequences, nums] = [el("span", {}), el("span", { class: "muted" }), el("div", { class: "nums" })];
  const canvas = el("canvas", { width: STRIP * 4, height: 10, "aria-hidden": "true" });
  const top = el("div", { class: "top" }, el("span", { class: "id" }, worker.id), phase, el("span", { class: "spring" }), sequences);
  const root = el("div", { class: "worker", role: "group", "aria-label": worker.id }, top, el("div", { class: "bar", "aria-hidden": "true" }, ...parts), nums, canvas);
  return { root, parts, phase, sequences, nums, canvas };
}

function showWorker(worker, { has_load: hasLoad, now }) {
  const card = cards.get(worker.id);
  const phase = worker.phase || "unknown";
  const isReady = phase === "ready";
  if (card.fill) {
    card.fill.style.height = `${used(worker) * 100}%`;
    card.root.classList.toggle("away", !isReady);
    const load = hasLoad ? `, ${percent(used(worker))} of KV in use, ${worker.sequences} sequences` : "";
    const text = `${worker.id}: ${phase}${load}`;
    card.root.setAttribute("aria-label", text);
    card.root.title = text;
    return;
  }
  setText(card.phase, isReady ? "" : phase);
  card.phase.className = ["lost", "failed"].includes(phase) ? "bad" : "warn";
  card.root.title = worker.detail;
  if (!hasLoad) {
    setText(card.nums, `${worker.blocks} blocks`);
    return;
  }
  setText(card.sequences, worker.sequences === 1 ? "1 sequence" : `${worker.sequences} sequences`);
  const blocks = worker.blocks || 1;
  [worker.active, worker.reserved, worker.cached].forEach((count, i) => {
    card.parts[i].style.width = `${(count / blocks) * 100}%`;
  });
  const drafts = worker.drafted ? `, ${worker.tokens_per_step.toFixed(2)} tokens a step, ${percent(worker.accepted / worker.drafted)} of drafts accepted` : "";
  const got = ["loaded", "fetched"].filter((kind) => worker[kind]).map((kind) => `, ${percent(worker[kind] / worker.prompt)} of prompts ${kind}`).join("");
  setText(card.nums, `${percent(used(worker))} of ${worker.blocks} blocks in use, ${percent(worker.cached / blocks)} cached${got}${drafts}`);
  drawStrip(card.canvas, worker.id, now);
}

// What moved between each pair lately, per second, and the mean size of a hand-over.
function movements(state) {
  past.push({ now: state.now, pairs: new Map(state.pairs.map((pair) => [nameOf(pair), pair])) });
  if (past.length > RECENT + 1) past.shift();
  const elapsed = Math.max(0.1, state.now - past[0].now);
  const moved = state.pairs.map((pair) => {
    const before = past[0].pairs.get(nameOf(pair)) ?? { bytes: 0, transfers: 0 };
    const [count, size] = [Math.max(0, pair.transfers - before.transfers), Math.max(0, pair.bytes - before.bytes)];
    return { ...pair, count: count / elapsed, moved: size / elapsed, size: count ? size / count : 0 };
  });
  return moved.sort((a, b) => b.moved - a.moved || b.bytes - a.bytes);
}

function nameOf(pair) {
  return `${pair.src} ${pair.dst} ${pair.transport}`;
}

// ---------------------------------------------------------------- hand-overs

function showArrows(moved, columns) {
  const canvas = byId("map").querySelector("svg.arrows");
  const isDense = columns.some(({ workers }) => workers.length > MAX_CARDS);
  const box = canvas.getBoundingClientRect();
  const middle = (root) => {
    const at = root.getBoundingClientRect();
    return { left: at.left - box.left, right: at.right - box.left, y: (at.top + at.bottom) / 2 - box.top };
  };
  const drawn = isDense ? [] : moved.filter((pair) => cards.has(pair.src) && cards.has(pair.dst)).slice(0, MAX_ARROWS);
  const most = Math.max(...drawn.map((pair) => pair.moved), 1);
  const places = new Map([...cards].map(([id, card]) => [id, middle(card.root)]));
  const senders = [...new Set(drawn.map((pair) => pair.src))].sort();
  const paths = drawn.reverse().map((pair) => {
    const share = senders.length > 1 ? senders.indexOf(pair.src) / (senders.length - 1) : 0.5;
    return arrow(pair, places.get(pair.src), places.get(pair.dst), most, 0.3 + 0.4 * share);
  });
  canvas.replaceChildren(...paths.flatMap((each) => each.lines), ...paths.flatMap((each) => each.labels));
}

// `share`: where on its way the label is; it differs between senders, so that labels of arrows that meet do not.
function arrow(pair, src, dst, most, share) {
  const toRight = src.right <= dst.left;
  const isSameSide = Math.abs(src.left - dst.left) < 1;
  const from = toRight || isSameSide ? src.right + 3 : src.left - 3;
  const to = isSameSide ? dst.right + 9 : toRight ? dst.left - 9 : dst.right + 9;
  const bend = isSameSide ? from + 40 : (from + to) / 2;
  const isIdle = pair.moved === 0;
  const width = isIdle ? 1 : 1.5 + 4.5 * Math.sqrt(pair.moved / most);
  const d = `M${from} ${src.y} C${bend} ${src.y} ${bend} ${dst.y} ${to} ${dst.y}`;
  const lines = [svg("path", { d, class: isIdle ? "idle" : "", "stroke-width": width })];
  if (isIdle) return { lines, labels: [] };
  const tip = isSameSide || !toRight ? -8 : 8;
  lines.push(svg("path", { class: "head", d: `M${to + tip} ${dst.y} l${-tip} -5 v10 z` }));
  const at = bezier(share, { x: from, y: src.y }, { x: bend, y: src.y }, { x: bend, y: dst.y }, { x: to, y: dst.y });
  return { lines, labels: Math.abs(to - from) < 90 ? [] : [svg("text", { x: at.x, y: at.y + 4 }, bytes(pair.size || pair.moved))] };
}

function bezier(t, ...points) {
  const weights = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3];
  return { x: points.reduce((sum, point, i) => sum + weights[i] * point.x, 0), y: points.reduce((sum, point, i) => sum + weights[i] * point.y, 0) };
}

function showPairs(moved, numPairs) {
  if (!moved.length) {
    byId("pairs").replaceChildren();
    return;
  }
  const rows = moved.slice(0, MAX_ROWS).map((pair) => ({
    cells: [`${pair.src} to ${pair.dst}`, pair.transport, rate(pair.count), pair.size ? bytes(pair.size) : "", `${bytes(pair.moved)}/s`, String(pair.transfers), bytes(pair.bytes), String(pair.failures)],
  }));
  const columns = ["Hand-overs", "by", "per s>", "size>", "KV>", "in all>", "KV in all>", "failed>"];
  const more = numPairs > rows.length ? el("p", { class: "legend" }, `the busiest ${rows.length} of ${numPairs} pairs`) : null;
  byId("pairs").replaceChildren(el("div", { class: "scroll" }, table(columns, rows, "Hand-overs between pairs of workers")), more ?? "");
}
