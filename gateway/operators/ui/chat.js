// Chat over /v1/chat/completions, as any client of the API has it.

import { call, events } from "./api.js";
import { byId, el, milliseconds } from "./dom.js";

const MAX_MESSAGES = 200;
let turns = [];
let running = null;
let explain = () => {};

// Which model answers can be chosen where there are several.
export function setModels(names) {
  const choice = byId("chat-model");
  if (choice.options.length === names.length && names.every((name, i) => choice.options[i].value === name)) return;
  choice.replaceChildren(...names.map((name) => el("option", {}, name)));
  choice.parentElement.hidden = names.length < 2;
}

export function startChat(showRequest) {
  explain = showRequest;
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
  byId("stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", () => {
    running?.abort();
    turns = [];
    greet();
    byId("prompt").focus();
  });
  greet();
}

function greet() {
  byId("messages").replaceChildren(el("p", { class: "empty" }, "Enter sends, Shift+Enter begins a new line."));
}

async function send() {
  const prompt = byId("prompt").value;
  if (!prompt.trim() || running) return;
  byId("prompt").value = "";
  if (!turns.length) byId("messages").replaceChildren();
  const own = turns;
  own.push({ role: "user", content: prompt });
  add("user", "You").text.append(prompt);
  const shown = add("assistant", "Model");
  running = new AbortController();
  setRunning(shown, true);
  const answer = { text: "", start: performance.now(), first: null, tokens: 0, reason: "" };
  try {
    await stream(own, answer, shown);
    own.push({ role: "assistant", content: answer.text });
  } catch (error) {
    const stopped = error.name === "AbortError";
    shown.note.textContent = stopped ? "stopped" : error.message;
    if (!stopped) shown.note.className = "bad";
    if (answer.text) own.push({ role: "assistant", content: answer.text });
    else own.pop();
  } finally {
    running = null;
    setRunning(shown, false);
  }
}

async function stream(messages, answer, shown) {
  const body = {
    model: byId("chat-model").value,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    max_completion_tokens: Number(byId("max-tokens").value) || 256,
    temperature: Number(byId("temperature").value),
  };
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  const draw = drawer(shown);
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (!answer.id && chunk.id) {
      answer.id = chunk.id.replace(/^chatcmpl-/, "");
      offerExplanation(shown, answer.id);
    }
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      answer.first ??= performance.now();
      answer.text += choice.delta.content;
      draw(choice.delta.content);
    }
    if (choice?.finish_reason) answer.reason = choice.finish_reason;
    if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
  }
  shown.note.textContent = measured(answer);
}

// New text is shown at most once a frame, as one more text node: the cost does not grow with the answer.
function drawer(shown) {
  let waiting = "";
  return (text) => {
    if (!waiting) {
      setTimeout(() => {
        const log = byId("messages");
        const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        shown.text.append(waiting);
        waiting = "";
        if (atEnd) log.scrollTop = log.scrollHeight;
      }, 30);
    }
    waiting += text;
  };
}

function measured(answer) {
  const parts = [`${answer.tokens} tokens`];
  if (answer.first !== null) {
    const seconds = (performance.now() - answer.first) / 1000;
    parts.push(`first after ${milliseconds(answer.first - answer.start)} ms`);
    if (answer.tokens > 1 && seconds > 0) parts.push(`${((answer.tokens - 1) / seconds).toFixed(0)} tokens/s`);
  }
  if (answer.reason && answer.reason !== "stop") parts.push(`ended by ${answer.reason}`);
  return parts.join(", ");
}

function offerExplanation(shown, id) {
  const button = el("button", { type: "button", class: "link" }, "How it ran");
  button.addEventListener("click", () => explain(id));
  shown.who.append(button);
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
  byId("messages").setAttribute("aria-busy", String(isRunning));
  byId("send").disabled = isRunning;
  byId("stop").hidden = !isRunning;
}
