// The npm client `openai`: the Responses API.

import {
  CHAT, CITY, LIMIT, STREAM, WEATHER, citySchema, key, load, model, run, v1, weather, weatherFunction,
} from "./program.mjs";

const { OpenAI } = await load("openai");
const client = new OpenAI({ baseURL: v1, apiKey: key });
const create = (fields) => client.responses.create({ model, max_output_tokens: LIMIT, ...fields });

await run({
  chat: async () => (await create({ input: CHAT })).output_text,
  stream: async () => {
    let text = "";
    for await (const event of await create({ input: STREAM, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return text;
  },
  tools: async () => {
    const tools = [{ type: "function", ...weatherFunction, strict: true }];
    const input = [{ role: "user", content: WEATHER }];
    const first = await create({ input, tools, tool_choice: "required" });
    const call = first.output.find((item) => item.type === "function_call");
    const output = weather(JSON.parse(call.arguments));
    input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output });
    return (await create({ input, tools })).output_text;
  },
  structured: async () => {
    const format = { type: "json_schema", name: "city", strict: true, schema: citySchema };
    return JSON.parse((await create({ input: CITY, text: { format } })).output_text);
  },
});
