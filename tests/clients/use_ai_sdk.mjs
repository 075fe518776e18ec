// What a user of Vercel's AI SDK does, one function each, with the three providers whose APIs the gateway speaks; run
// in the folder of that package's environment:
//
//     node use_ai_sdk.mjs URL MODEL

import assert from "node:assert";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const options = { baseURL, apiKey: "any" };
const PROVIDERS = {
  compatible: createOpenAICompatible({ name: "disagg", ...options, supportsStructuredOutputs: true, includeUsage: true })(name),
  responses: createOpenAI(options).responses(name),
  anthropic: createAnthropic(options)(name),
};
const SHARED = { system: "You answer in one short sentence.", maxRetries: 0, maxOutputTokens: 60, temperature: 0 };
const ONE_CALL = {
  disagg: { parallel_tool_calls: false },
  openai: { parallelToolCalls: false },
  anthropic: { disableParallelToolUse: true },
};
const PROMPT = "What is the capital of France?";
const WEATHER = z.object({ city: z.enum(["Paris", "Rome", "Oslo"]), days: z.number().int().min(1).max(9) });

async function text(model) {
  const answer = await generateText({ model, prompt: PROMPT, ...SHARED });
  assert.notEqual(answer.text, "");
  assert(answer.usage.outputTokens > 0 && answer.usage.inputTokens > 0);
  assert(["stop", "length"].includes(answer.finishReason));
}

async function stream(model) {
  const answer = streamText({ model, prompt: PROMPT, ...SHARED, onError: ({ error }) => { throw error; } });
  let whole = "";
  for await (const part of answer.textStream) whole += part;
  assert.equal(whole, await answer.text);
  assert.notEqual(whole, "");
  assert((await answer.usage).outputTokens > 0);
}

async function tools(model) {
  const calls = [];
  const get_weather = tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => { calls.push(city); return `Sunny in ${city}.`; },
  });
  const answer = await generateText({
    model,
    prompt: "What is the weather in Paris?",
    tools: { get_weather },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    stopWhen: stepCountIs(2),
    providerOptions: ONE_CALL,
    ...SHARED,
  });
  assert(calls.length === 1 && ["Paris", "Rome"].includes(calls[0]));
  assert.equal(answer.steps.length, 2);
  assert.notEqual(answer.text, "");
}

async function object(model) {
  const answer = await generateText({ model, prompt: PROMPT, output: Output.object({ schema: WEATHER }), ...SHARED });
  WEATHER.parse(answer.output);
}

async function objectStreamed(model) {
  const answer = streamText({ model, prompt: PROMPT, output: Output.object({ schema: WEATHER }), ...SHARED });
  let last;
  for await (const part of answer.partialOutputStream) last = part;
  WEATHER.parse(last);
}

async function refused(model) {
  await assert.rejects(generateText({ model, prompt: PROMPT, ...SHARED, topP: 7 }), (error) => error.statusCode === 400);
}

let failed = 0;
for (const [provider, model] of Object.entries(PROVIDERS)) {
  for (const check of [text, stream, tools, object, objectStreamed, refused]) {
    try {
      await check(model);
      console.log(`ok ${provider}.${check.name}`);
    } catch (error) {
      failed += 1;
      console.log(`failed ${provider}.${check.name}`);
      console.error(error);
    }
  }
}
process.exit(failed ? 1 : 0);
