// Chat over /v1/chat/completions, as any client of the API has it.

import { ApiError, call, events } from "./api.js";
import { byId, el, milliseconds, setOptions, setText } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const MAX_MESSAGES = 200;
const DRAW_MS = 30;
let turns = []; // what the model gets, without the system prompt
let running = null; // what stops the answer that comes
let linkTo = () => "";
const retry = el("button", { type: "button", class: "link" }, "Retry");

// Which model answers can be chosen where there are several.
export function setModels(names) {
  setOptions(byId("chat-model"), names.map((name) => [name, name]));
  byId("chat-model").parentElement.hidden = names.length < 2;
}

export function startChat(linkToRequest) {
  linkTo = linkToRequest;
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("system").addEventListener("input", () => setText(byId("system-state"), byId("system").value.trim() ? "set" : "none"));
  byId("stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", () => {
    running?.abort();
    turns = [];
    greet();
    byId("prompt").focus();
  });
  retry.addEventListener("click", again);
  greet();
}

function greet() {
  byId("messages").replaceChildren(el("p", { class: "empty" }, "Enter sends, Shift+Enter begins a new line."));
}

function send() {
  const prompt = byId("prompt").value;
  if (!prompt.trim() || running) return;
  byId("prompt").value = "";
  if (!turns.length) byId("messages").replaceChildren();
  if (turns.at(-1)?.role === "user") turns.pop(); // it had no answer
  turns.push({ role: "user", content: prompt });
  add("user", "You").text.append(prompt);
  answer();
}

// The last answer is asked for once more, and the new one takes its place.
function again() {
  if (running) return;
  retry.closest(".message").remove();
  if (turns.at(-1)?.role === "assistant") turns.pop();
  byId("prompt").focus();
  answer();
}

async function answer() {
  retry.remove();
  const own = turns; // a new chat has another list
  const shown = add("assistant", "Model");
  const stop = (running = new AbortController());
  setRunning(shown, true);
  const made = { text: "", start: performance.now(), first: null, tokens: 0, reason: "" };
  const draw = drawer(shown, made);
  try {
    await stream(own, made, shown, draw, stop.signal);
    setText(shown.note, measured(made));
  } catch (error) {
    const isStopped = error.name === "AbortError";
    setText(shown.note, isStopped ? "stopped" : error.message);
    if (!isStopped) shown.note.className = "bad";
  }
  draw.now();
  if (made.text) own.push({ role: "assistant", content: made.text });
  if (running === stop) running = null;
  setRunning(shown, false);
  if (own === turns) shown.who.append(retry);
}

async function stream(messages, made, shown, draw, signal) {
  const system = byId("system").value.trim();
  const body = {
    model: byId("chat-model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    max_completion_tokens: Number(byId("max-tokens").value) || 256,
    temperature: Number(byId("temperature").value),
  };
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(0, chunk.error.message);
    if (!made.id && chunk.id) {
      made.id = chunk.id.replace(/^chatcmpl-/, "");
      shown.who.append(el("a", { href: linkTo(made.id) }, "How it ran"));
    }
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      made.first ??= performance.now();
      made.text += choice.delta.content;
      draw.soon();
    }
    if (choice?.finish_reason) made.reason = choice.finish_reason;
    if (chunk.usage) made.tokens = chunk.usage.completion_tokens;
  }
  throw new ApiError(0, "The answer broke off");
}

// New text is shown at most once a frame, and less often where that takes long.
function drawer(shown, made) {
  const view = new MarkdownView(shown.text);
  let [timer, pause] = [0, DRAW_MS];
  const now = () => {
    clearTimeout(timer);
    timer = 0;
    const began = performance.now();
    const log = byId("messages");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    view.show(made.text);
    if (atEnd) log.scrollTop = log.scrollHeight;
    pause = Math.max(DRAW_MS, 5 * (performance.now() - began));
  };
  return { now, soon: () => (timer ||= setTimeout(now, pause)) };
}

function measured(made) {
  const parts = [`${made.tokens} tokens`];
  if (made.first !== null) {
    const seconds = (performance.now() - made.first) / 1000;
    parts.push(`first after ${milliseconds(made.first - made.start)} ms`);
    if (made.tokens > 1 && seconds > 0) parts.push(`${((made.tokens - 1) / seconds).toFixed(0)} tokens/s`);
  }
  if (made.reason && made.reason !== "stop") parts.push(`ended by ${made.reason}`);
  return parts.join(", ");
}

function add(role, name) {
  const [text, note] = [el("div", { class: "text" }), el("span", {})];
  const who = el("div", { class: "who" }, el("b", {}, name), note);
  const box = el("div", { class: `message ${role}` }, who, text);
  const log = byId("messages");
  log.append(box);
  while (log.childElementCount > MAX_MESSAGES) log.firstElementChild.remove();
  log.scrollTop = log.scrollHeight;
  return { box, who, text, note };
}

function setRunning(shown, isRunning) {
  shown.box.classList.toggle("running", isRunning);
  if (!isRunning && running) return; // another answer is under way
  byId("messages").setAttribute("aria-busy", String(isRunning));
  byId("send").disabled = isRunning;
  if (!isRunning && document.activeElement === byId("stop")) byId("prompt").focus();
  byId("stop").hidden = !isRunning;
}
