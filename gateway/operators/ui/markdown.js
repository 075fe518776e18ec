// Markdown of models as elements: paragraphs, headings, lists, quotes, code, tables, emphasis, links. No part of it
// becomes HTML: every element is made here, and all text is text. What is not understood is shown as it was written.
//
// The time is proportional to the text, whatever it is: nothing is searched twice, and nesting is bounded.

import { el } from "./dom.js";

const MAX_DEPTH = 8; // of lists and quotes
const MAX_OPEN = 16; // emphasis and links inside each other
const MAX_URL = 2048;

// A text that grows. Blocks that can no longer change are made once; only the last ones are made again.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.numSettled = 0; // characters
    this.open = [];
  }

  show(text) {
    this.open.forEach((node) => node.remove());
    const cut = this.numSettled + settled(text.slice(this.numSettled));
    this.root.append(...render(text.slice(this.numSettled, cut)));
    this.numSettled = cut;
    this.open = render(text.slice(cut));
    this.root.append(...this.open);
  }
}

export function render(text) {
  return blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
}

// How much of a text is complete blocks: up to the last line at the margin that follows an empty one.
function settled(text) {
  let [at, cut, fence, wasEmpty] = [0, 0, null, false];
  for (const line of text.split("\n")) {
    if (fence) {
      if (closes(line, fence)) fence = null;
    } else {
      if (wasEmpty && line.trim() && !line.startsWith(" ") && !line.startsWith("\t") && !itemOf(line)) cut = at;
      fence = fenceOf(line);
    }
    wasEmpty = !line.trim();
    at += line.length + 1;
  }
  return cut;
}

// ---------------------------------------------------------------- blocks

function blocks(lines, depth) {
  const made = [];
  let i = 0;
  while (i < lines.length) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const read = READERS.find(({ begins }) => begins(lines, i, depth)) ?? { take: paragraph };
    const { node, next } = read.take(lines, i, depth);
    made.push(node);
    i = next;
  }
  return made;
}

const READERS = [
  { begins: (lines, i) => fenceOf(lines[i]), take: code },
  { begins: (lines, i) => headingOf(lines[i]), take: heading },
  { begins: (lines, i) => isRule(lines[i]), take: (lines, i) => ({ node: el("hr"), next: i + 1 }) },
  { begins: (lines, i, depth) => depth < MAX_DEPTH && isQuote(lines[i]), take: quote },
  { begins: (lines, i, depth) => depth < MAX_DEPTH && itemOf(lines[i]), take: list },
  { begins: (lines, i) => tableAt(lines, i), take: grid },
];

function fenceOf(line) {
  const found = /^ {0,3}(`{3,}|~{3,})(.*)$/.exec(line);
  if (!found || (found[1][0] === "`" && found[2].includes("`"))) return null;
  return { mark: found[1], language: found[2].trim().split(" ")[0], indent: line.indexOf(found[1]) };
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.mark.length && text === fence.mark[0].repeat(text.length);
}

function code(lines, i) {
  const fence = fenceOf(lines[i]);
  let end = i + 1;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  const text = lines.slice(i + 1, end).map((line) => dedented(line, fence.indent)).join("\n");
  const name = fence.language ? el("div", { class: "language" }, fence.language) : null;
  const label = fence.language ? `Code, ${fence.language}` : "Code";
  const shown = el("pre", { tabindex: "0", role: "region", "aria-label": label }, el("code", {}, text));
  return { node: el("div", { class: "code" }, name, shown), next: end + 1 };
}

function headingOf(line) {
  return /^ {0,3}(#{1,6})(?: |$)/.exec(line);
}

function heading(lines, i) {
  const found = headingOf(lines[i]);
  const text = lines[i].slice(found[0].length).trim();
  const bare = text.slice(0, lengthWithout(text, "#"));
  const title = bare === "" || bare.endsWith(" ") ? bare.trim() : text;
  return { node: el(`h${Math.min(6, found[1].length + 2)}`, {}, ...inline(title)), next: i + 1 };
}

function lengthWithout(text, mark) {
  let length = text.length;
  while (length && text[length - 1] === mark) length -= 1;
  return length;
}

function isRule(line) {
  return /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replaceAll(" ", ""));
}

const isQuote = (line) => /^ {0,3}>/.test(line);

function quote(lines, i, depth) {
  const inner = [];
  for (; i < lines.length && isQuote(lines[i]); i += 1) inner.push(lines[i].replace(/^ {0,3}> ?/, ""));
  return { node: el("blockquote", {}, ...blocks(inner, depth + 1)), next: i };
}

function itemOf(line) {
  const found = /^( {0,3})([-*+]|\d{1,9}[.)])(?: |$)/.exec(line);
  if (!found || isRule(line)) return null;
  const rest = line.slice(found[0].length);
  const space = rest.trim() ? Math.min(4, rest.length - rest.trimStart().length) : 0;
  return { indent: found[1].length, width: found[0].length + space, kind: found[2].slice(-1), number: parseInt(found[2], 10) };
}

function list(lines, i, depth) {
  const first = itemOf(lines[i]);
  const items = [];
  let isLoose = false;
  while (i < lines.length) {
    const item = itemOf(lines[i]);
    if (!item || item.kind !== first.kind || item.indent > first.indent + 1) break;
    const own = [lines[i].slice(item.width)];
    i += 1;
    for (; i < lines.length && belongs(lines, i, item); i += 1) own.push(dedented(lines[i], item.width));
    while (own.length && !own.at(-1).trim()) {
      own.pop();
      isLoose ||= i < lines.length && itemOf(lines[i])?.kind === first.kind;
    }
    isLoose ||= own.some((line) => !line.trim());
    items.push(own);
  }
  const made = items.map((own) => el("li", {}, ...blocks(own, depth + 1).flatMap((node) => (!isLoose && node.localName === "p" ? [...node.childNodes] : [node]))));
  const isOrdered = !Number.isNaN(first.number);
  return { node: isOrdered ? el("ol", { start: first.number }, ...made) : el("ul", {}, ...made), next: i };
}

// Whether a line goes on with a list item: an empty or an indented one, or one that goes on with its paragraph.
function belongs(lines, i, item) {
  const line = lines[i];
  if (!line.trim()) return true;
  const indent = line.length - line.trimStart().length;
  if (indent >= Math.min(item.width, item.indent + 2)) return true;
  return Boolean(lines[i - 1].trim()) && !itemOf(line) && !fenceOf(line) && !headingOf(line) && !isQuote(line) && !isRule(line);
}

function dedented(line, width) {
  return line.slice(Math.min(width, line.length - line.trimStart().length));
}

function tableAt(lines, i) {
  if (!lines[i].includes("|") || !lines[i + 1]?.includes("-")) return false;
  const rules = cellsOf(lines[i + 1]);
  return rules.length === cellsOf(lines[i]).length && rules.every((cell) => /^:?-+:?$/.test(cell));
}

function grid(lines, i) {
  const aligned = cellsOf(lines[i + 1]).map((rule) => (!rule.endsWith(":") ? {} : { class: rule.startsWith(":") ? "middle" : "num" }));
  const line = (name, text) => el("tr", {}, ...cellsOf(text).slice(0, aligned.length).map((cell, k) => el(name, aligned[k], ...inline(cell))));
  const head = line("th", lines[i]);
  [...head.cells].forEach((cell) => cell.setAttribute("scope", "col"));
  const body = [];
  for (i += 2; i < lines.length && lines[i].includes("|"); i += 1) body.push(line("td", lines[i]));
  const made = el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
  return { node: el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, made), next: i };
}

function cellsOf(line) {
  const text = line.trim();
  const cells = [""];
  for (let i = text.startsWith("|") ? 1 : 0; i < text.length; i += 1) {
    if (text[i] === "|") {
      if (i < text.length - 1) cells.push("");
    } else if (text[i] === "\\" && text[i + 1] === "|") {
      cells[cells.length - 1] += "|";
      i += 1;
    } else {
      cells[cells.length - 1] += text[i];
    }
  }
  return cells.map((cell) => cell.trim());
}

function paragraph(lines, i, depth) {
  const own = [lines[i].trimStart()];
  for (i += 1; i < lines.length && lines[i].trim() && !READERS.some(({ begins }) => begins(lines, i, depth)); i += 1) own.push(lines[i].trimStart());
  return { node: el("p", {}, ...inline(own.join("\n").trimEnd())), next: i };
}

// ---------------------------------------------------------------- inside a block

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

// `open` has what began and did not end yet, with the nodes after each; what never ends is text.
function inline(text) {
  const open = [{ mark: "", count: 0, nodes: [] }];
  const numOpen = {};
  const ticks = backticks(text);
  let buffer = "";
  let linkAt = -2;

  const flush = () => {
    if (buffer) open.at(-1).nodes.push(document.createTextNode(buffer));
    buffer = "";
  };
  const push = (mark, count, lead = "") => {
    flush();
    open.push({ mark, count, lead, nodes: [] });
    numOpen[mark] = (numOpen[mark] ?? 0) + 1;
  };
  // The last one as text, into the one around it.
  const giveUp = () => {
    flush();
    const { mark, count, lead, nodes } = open.pop();
    numOpen[mark] -= 1;
    open.at(-1).nodes.push(document.createTextNode(lead + mark.repeat(count)), ...nodes);
  };
  const downTo = (mark) => {
    while (open.at(-1).mark !== mark) giveUp();
  };
  const close = (mark, count) => {
    while (count && canClose(mark, count)) {
      downTo(mark);
      flush();
      const last = open.at(-1);
      const size = mark === "~" || (count >= 2 && last.count >= 2) ? 2 : 1;
      const made = el(mark === "~" ? "del" : size === 2 ? "strong" : "em", {}, ...last.nodes);
      count -= size;
      last.count -= size;
      last.nodes = [made];
      if (!last.count) {
        open.pop();
        numOpen[mark] -= 1;
        open.at(-1).nodes.push(made);
      }
    }
    return count;
  };
  // Emphasis that began before a link does not end in it.
  const canClose = (mark, count) => numOpen[mark] && open.slice(open.findLastIndex((each) => each.mark === "[") + 1).some((each) => each.mark === mark) && (mark !== "~" || count === 2);

  for (let i = 0; i < text.length; i += 1) {
    const char = text[i];
    if (char === "\\" && i + 1 < text.length && PUNCTUATION.test(text[i + 1])) {
      buffer += text[i + 1];
      i += 1;
    } else if (char === "\n") {
      buffer = buffer.trimEnd();
      flush();
      open.at(-1).nodes.push(el("br"));
    } else if (char === "`") {
      const count = runLength(text, i);
      const end = ticks.next(count, i + count);
      if (end < 0) {
        buffer += "`".repeat(count);
        i += count - 1;
      } else {
        flush();
        open.at(-1).nodes.push(el("code", {}, spanText(text.slice(i + count, end))));
        i = end + count - 1;
      }
    } else if (char === "*" || char === "_" || char === "~") {
      const count = runLength(text, i);
      const [opens, ends] = flanks(text, i, count, char);
      let left = ends ? close(char, count) : count;
      if (left && opens && open.length <= MAX_OPEN && left <= 3 && (char !== "~" || left === 2)) {
        push(char, left);
        left = 0;
      }
      buffer += char.repeat(left);
      i += count - 1;
    } else if (char === "[" || (char === "!" && text[i + 1] === "[")) {
      if (linkAt !== -1 && linkAt < i) linkAt = text.indexOf("](", i);
      if (linkAt > i && !numOpen["["] && open.length <= MAX_OPEN) {
        push("[", 1, char === "!" ? "!" : "");
        if (char === "!") i += 1; // an image is shown as a link to it: the page loads nothing
      } else {
        buffer += char;
      }
    } else if (char === "]" && numOpen["["]) {
      const target = targetAt(text, i + 1);
      downTo("[");
      flush();
      if (target) {
        const { nodes } = open.pop();
        numOpen["["] -= 1;
        open.at(-1).nodes.push(link(target.url, nodes.length ? nodes : [target.url]));
        i = target.end;
      } else {
        giveUp();
        buffer += "]";
      }
    } else if ((char === "h" || char === "<") && !numOpen["["] && (i === 0 || char === "<" || !WORD.test(text[i - 1]))) {
      const found = bareUrl(text, i, char === "<");
      if (found) {
        flush();
        open.at(-1).nodes.push(link(found.url, [found.shown]));
        i = found.end;
      } else {
        buffer += char;
      }
    } else {
      buffer += char;
    }
  }
  while (open.length > 1) giveUp();
  flush();
  return open[0].nodes;
}

function runLength(text, i) {
  let end = i;
  while (text[end] === text[i]) end += 1;
  return end - i;
}

// Where runs of as many backticks begin. Asked with places that grow.
function backticks(text) {
  const places = new Map();
  for (let i = text.indexOf("`"); i >= 0; i = text.indexOf("`", i)) {
    const count = runLength(text, i);
    if (!places.has(count)) places.set(count, []);
    places.get(count).push(i);
    i += count;
  }
  for (const list of places.values()) list.reverse();
  return {
    next(count, from) {
      const list = places.get(count) ?? [];
      while (list.length && list.at(-1) < from) list.pop();
      return list.at(-1) ?? -1;
    },
  };
}

function spanText(text) {
  const line = text.replaceAll("\n", " ");
  return line.length > 2 && line.startsWith(" ") && line.endsWith(" ") && line.trim() ? line.slice(1, -1) : line;
}

// Whether a run of marks can begin emphasis, and whether it can end it.
function flanks(text, i, count, mark) {
  const [before, after] = [text[i - 1] ?? " ", text[i + count] ?? " "];
  const [isLeft, isRight] = [/\S/.test(after), /\S/.test(before)];
  const left = isLeft && (!PUNCTUATION.test(after) || !isRight || PUNCTUATION.test(before));
  const right = isRight && (!PUNCTUATION.test(before) || !isLeft || PUNCTUATION.test(after));
  return mark === "_" ? [left && (!right || PUNCTUATION.test(before)), right && (!left || PUNCTUATION.test(after))] : [left, right];
}

// The target of a link in parentheses; null for what is no address of the web.
function targetAt(text, i) {
  if (text[i] !== "(") return null;
  let depth = 0;
  for (let end = i; end < text.length && end - i < MAX_URL; end += 1) {
    if (text[end] === "(") depth += 1;
    if (text[end] === ")") depth -= 1;
    if (!depth) {
      const inside = text.slice(i + 1, end).trim();
      const url = webUrl(inside.split(/\s/, 1)[0].replace(/^<|>$/g, ""));
      return url && { url, end };
    }
  }
  return null;
}

function bareUrl(text, i, isBracketed) {
  const from = isBracketed ? i + 1 : i;
  const found = /^https?:\/\/[^\s<>"`]+/.exec(text.slice(from, from + MAX_URL));
  if (!found) return null;
  let shown = found[0];
  if (isBracketed && text[from + shown.length] !== ">") return null;
  if (!isBracketed) {
    while (/[.,;:!?'*_~)\]|]$/.test(shown) && !(shown.endsWith(")") && shown.includes("("))) shown = shown.slice(0, -1);
  }
  const url = webUrl(shown);
  return url && { url, shown, end: from + shown.length - (isBracketed ? 0 : 1) };
}

function webUrl(text) {
  if (!/^https?:\/\//i.test(text) || !URL.canParse(text)) return null;
  const { protocol, href } = new URL(text);
  return protocol === "http:" || protocol === "https:" ? href : null;
}

function link(url, nodes) {
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, ...nodes);
}
