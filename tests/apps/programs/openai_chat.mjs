// The npm client `openai`: chats and embeddings.

import {
  CHAT, CITY, LIMIT, STREAM, WEATHER, citySchema, key, load, messages, model, run, v1, weather, weatherFunction,
} from "./program.mjs";

const { OpenAI } = await load("openai");
const client = new OpenAI({ baseURL: v1, apiKey: key });
const create = (fields) => client.chat.completions.create({ model, max_tokens: LIMIT, ...fields });

await run({
  chat: async () => (await create({ messages: messages(CHAT) })).choices[0].message.content,
  stream: async () => {
    let text = "";
    for await (const chunk of await create({ messages: messages(STREAM), stream: true })) {
      text += chunk.choices[0]?.delta.content ?? "";
    }
    return text;
  },
  tools: async () => {
    const offered = { model, max_tokens: LIMIT, messages: messages(WEATHER) };
    const tool = { ...weatherFunction, parse: JSON.parse, function: weather };
    return client.chat.completions.runTools({ ...offered, tools: [{ type: "function", function: tool }] }).finalContent();
  },
  structured: async () => {
    const format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: citySchema } };
    const answer = await client.chat.completions.parse({
      model, max_tokens: LIMIT, messages: messages(CITY), response_format: format,
    });
    return JSON.parse(answer.choices[0].message.content);
  },
  embeddings: async () => (await client.embeddings.create({ model, input: ["one", "two"] })).data.length,
});
