// The npm client `ollama`.

import {
  CHAT, CITY, LIMIT, STREAM, WEATHER, citySchema, key, load, messages, model, root, run, weather, weatherFunction,
} from "./program.mjs";

const { Ollama } = await load("ollama");
const client = new Ollama({ host: root, headers: { Authorization: `Bearer ${key}` } });
const chat = (fields) => client.chat({ model, options: { num_predict: LIMIT }, ...fields });

await run({
  chat: async () => (await chat({ messages: messages(CHAT) })).message.content,
  stream: async () => {
    let text = "";
    for await (const part of await chat({ messages: messages(STREAM), stream: true })) text += part.message.content;
    return text;
  },
  tools: async () => {
    const tools = [{ type: "function", function: weatherFunction }];
    const said = messages(WEATHER);
    const { message } = await chat({ messages: said, tools });
    const [call] = message.tool_calls;
    said.push(message, { role: "tool", tool_name: call.function.name, content: weather(call.function.arguments) });
    return (await chat({ messages: said, tools })).message.content;
  },
  structured: async () => JSON.parse((await chat({ messages: messages(CITY), format: citySchema })).message.content),
  embeddings: async () => (await client.embed({ model, input: ["one", "two"] })).embeddings.length,
  models: async () => (await client.list()).models.map(({ model }) => model),
});
