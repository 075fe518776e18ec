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

// Replaces the options of a list of choices where they differ; the choice is kept where it is still one.
export function setOptions(list, options) {
  if (list.options.length === options.length && options.every(([value], i) => list.options[i].value === value)) return;
  const chosen = list.value;
  list.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) list.value = chosen;
}

// Rows of [text or element, ...]; a name that ends in ">" is right-aligned. On a narrow screen each row is a block of
// named values, see style.css; the roles keep it a table for screen readers.
export function table(columns, rows, label) {
  const head = columns.map((name) => {
    const attributes = { role: "columnheader", scope: "col" };
    return el("th", isNumber(name) ? { ...attributes, class: "num" } : attributes, nameOf(name));
  });
  const body = el("tbody", { role: "rowgroup" }, ...rows.map((each) => row(columns, each)));
  const thead = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...head));
  return el("table", { role: "table", class: "stack", ...(label ? { "aria-label": label } : {}) }, thead, body);
}

export function row(columns, { cells, className }) {
  const made = cells.map((value, i) => {
    const attributes = { role: "cell", "data-label": nameOf(columns[i]) };
    return el("td", isNumber(columns[i]) ? { ...attributes, class: "num" } : attributes, value ?? "");
  });
  return el("tr", className ? { role: "row", class: className } : { role: "row" }, ...made);
}

const isNumber = (column) => column.endsWith(">");
const nameOf = (column) => column.replace(/>$/, "");

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

export function percent(share) {
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

// A round number with few digits, as axes have them: 0.5, 20, 1.5 k.
export function short(value) {
  const units = [[1e9, " G"], [1e6, " M"], [1e3, " k"]];
  const [size, unit] = units.find(([least]) => value >= least) ?? [1, ""];
  return `${Number((value / size).toPrecision(3))}${unit}`;
}

export function ago(seconds) {
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h`;
  return seconds >= 60 ? `${Math.floor(seconds / 60)} min` : `${Math.max(0, Math.round(seconds))} s`;
}

// HH:MM:SS here of a time in seconds since the epoch.
export function clock(seconds) {
  const at = new Date(seconds * 1000);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((each) => String(each).padStart(2, "0")).join(":");
}
