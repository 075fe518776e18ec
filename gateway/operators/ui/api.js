// Calls of the gateway that served this page, with the key of this tab.

const KEY = "disagg.key";
const NO_ANSWER = "No answer from the gateway";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// `status` is that of HTTP, 0 if there was no answer.
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await reached(fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" }));
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `The gateway answered ${response.status}`);
}

export async function json(response) {
  return reached(response.json());
}

// The data of server-sent events, one string each.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reached(reader.read(), "The answer broke off, and the gateway does not answer");
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

async function reached(promise, message = NO_ANSWER) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(0, message);
  }
}
