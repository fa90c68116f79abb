// The npm client `@anthropic-ai/sdk`.

import { CHAT, LIMIT, STREAM, WEATHER, key, load, messages, model, root, run, weather, weatherFunction } from "./program.mjs";

const { default: Anthropic } = await load("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: root, apiKey: key });
const create = (fields) => client.messages.create({ model, max_tokens: LIMIT, ...fields });

await run({
  chat: async () => (await create({ messages: messages(CHAT) })).content[0].text,
  stream: async () => client.messages.stream({ model, max_tokens: LIMIT, messages: messages(STREAM) }).finalText(),
  tools: async () => {
    const { name, description, parameters } = weatherFunction;
    const tools = [{ name, description, input_schema: parameters }];
    const said = messages(WEATHER);
    const first = await create({ messages: said, tools, tool_choice: { type: "any" } });
    const call = first.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: weather(call.input) };
    said.push({ role: "assistant", content: first.content }, { role: "user", content: [result] });
    return (await create({ messages: said, tools })).content[0].text;
  },
  count_tokens: async () => (await client.messages.countTokens({ model, messages: messages(CHAT) })).input_tokens,
});
