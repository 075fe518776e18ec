// Elements and numbers. All text, also that of models and clients, goes through textContent.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Rows of [text or element, ...]; a name that ends in ">" is right-aligned.
export function table(columns, rows, label) {
  const isNumber = columns.map((name) => name.endsWith(">"));
  const cell = (name, value, i) => el(name, isNumber[i] ? { class: "num" } : {}, value ?? "");
  const head = columns.map((name, i) => cell("th", name.replace(/>$/, ""), i));
  head.forEach((each) => each.setAttribute("scope", "col"));
  const body = rows.map(({ cells, className }) =>
    el("tr", className ? { class: className } : {}, ...cells.map((value, i) => cell("td", value, i))));
  return el("table", label ? { "aria-label": label } : {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}

export function facts(list, entries) {
  list.replaceChildren(...entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; count >= 1024 && i < units.length - 1; i += 1) count /= 1024;
  return `${i === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${units[i]}`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "";
  return value < 100 ? value.toFixed(1) : value.toFixed(0);
}

export function rate(value) {
  return value < 10 ? value.toFixed(1) : value.toFixed(0);
}

export function ago(seconds) {
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h`;
  return seconds >= 60 ? `${Math.floor(seconds / 60)} min` : `${Math.max(0, Math.round(seconds))} s`;
}
