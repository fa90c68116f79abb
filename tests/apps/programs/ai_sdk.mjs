// The Vercel AI SDK, by the provider that `via` names: openai-compatible, openai-chat, openai (its Responses) or anthropic.

import { CHAT, CITY, LIMIT, STREAM, WEATHER, citySchema, given, key, load, model as name, run, v1, weather, weatherFunction } from "./program.mjs";

const { Output, generateText, jsonSchema, stepCountIs, streamText, tool } = await load("ai");

async function chosen() {
  switch (given.via) {
    case "openai-compatible": {
      const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
      return createOpenAICompatible({ name: "keepgate", baseURL: v1, apiKey: key, supportsStructuredOutputs: true })(name);
    }
    case "anthropic": {
      const { createAnthropic } = await load("@ai-sdk/anthropic");
      return createAnthropic({ baseURL: v1, apiKey: key })(name);
    }
  }
  const { createOpenAI } = await load("@ai-sdk/openai");
  const openai = createOpenAI({ baseURL: v1, apiKey: key });
  return given.via === "openai-chat" ? openai.chat(name) : openai(name);
}

const asked = { model: await chosen(), maxOutputTokens: LIMIT, maxRetries: 0 };

await run({
  chat: async () => (await generateText({ ...asked, prompt: CHAT })).text,
  stream: async () => {
    let text = "";
    for await (const part of streamText({ ...asked, prompt: STREAM, onError: ({ error }) => { throw error; } }).textStream) text += part;
    return text;
  },
  tools: async () => {
    const { description, parameters } = weatherFunction;
    const get_weather = tool({ description, inputSchema: jsonSchema(parameters), execute: weather });
    return (await generateText({ ...asked, prompt: WEATHER, tools: { get_weather }, stopWhen: stepCountIs(3) })).text;
  },
  structured: async () => {
    const output = Output.object({ schema: jsonSchema(citySchema) });
    return (await generateText({ ...asked, prompt: CITY, output })).output;
  },
});
